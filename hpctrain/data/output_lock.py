"""Lock that keeps two processes from writing the same output file."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import HpctrainError
from hpctrain.files import check_output, read_text
from hpctrain.text import escaped

if TYPE_CHECKING:
    from hpctrain.comm.world import World

_HOLDER_BYTES = 1000


@contextmanager
def lock_output(world: World, out: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Lock the output file `out` during the block. Collective.

    The operating system releases the lock when the process ends, also if it is killed.

    Args:
        world: The world; rank 0 takes the lock.
        out: The output file. The lock is taken on `lock_path(out)`.
        warn: Function that prints a warning on rank 0 if the file system does not support locks.

    Raises:
        HpctrainError: Another process has locked the file; raised on all ranks.
    """
    descriptor: int | None = None
    with world.agreement():
        if world.rank == 0:
            check_output(out, replace=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(out, warn)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                lock_path(out).unlink()  # before the lock is released: the next process makes a new file
            os.close(descriptor)


def lock_path(out: Path) -> Path:
    """Return the path of the file that is locked while `out` is written."""
    return out.with_name(f".{out.name}.lock")


def _lock(out: Path, warn: Callable[[str], None]) -> int:
    """Create and lock the lock file of an output, and return its file descriptor."""
    path = lock_path(out)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise HpctrainError(
                f"{escaped(str(out))}: another `hpctrain prepare` is writing it ({_holder(path)}); "
                "wait until it has ended, or give another file"
            ) from None
        except OSError as error:
            reason = f"this file system does not support locks ({error.strerror})"
            warn(f"{out.parent}: {reason}: make sure that no second process writes {out.name}")
        if _is_same_file(path, descriptor):
            break
        os.close(descriptor)  # another process has removed this lock file, so lock the new one
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _is_same_file(path: Path, descriptor: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _holder(path: Path) -> str:
    """Return the process that holds the lock, in words; "unknown" if the file is empty."""
    with suppress(OSError, ValueError):
        return escaped(read_text(path, _HOLDER_BYTES).strip()) or "unknown"
    return "unknown"
