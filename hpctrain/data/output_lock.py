"""Keeping a second process from making the same output as this one."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.characters import escaped
from hpctrain.errors import HpctrainError
from hpctrain.files import check_output, read_text

if TYPE_CHECKING:
    from hpctrain.comm.world import World

_HOLDER_BYTES = 1000


@contextmanager
def hold_output(world: World, out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the output `out` inside; HpctrainError on all ranks if another process holds it. Collective.

    The lock ends with the process, however that ends. Where the file system has no locks, rank 0 says so.
    """
    descriptor: int | None = None
    with world.agreement():
        if world.rank == 0:
            check_output(out, replace=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(out, say)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                lock_path(out).unlink()  # before it is free: who comes next makes a new one
            os.close(descriptor)


def lock_path(out: Path) -> Path:
    """Return the file that is locked while `out` is made."""
    return out.with_name(f".{out.name}.lock")


def _lock(out: Path, say: Callable[[str], None]) -> int:
    """Lock the file beside an output and return its descriptor."""
    path = lock_path(out)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise HpctrainError(
                f"{escaped(str(out))}: another `hpctrain prepare` is making it ({_holder(path)}); "
                "let it end, or name another file"
            ) from None
        except OSError as error:
            lacks = f"this file system has no locks ({error.strerror})"
            say(f"{out.parent}: {lacks}: nothing keeps a second process from making {out.name}")
        if _is_same(path, descriptor):
            break
        os.close(descriptor)  # another process has removed it meanwhile
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _is_same(path: Path, descriptor: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _holder(path: Path) -> str:
    with suppress(OSError, ValueError):
        return escaped(read_text(path, _HOLDER_BYTES).strip()) or "unknown"
    return "unknown"
