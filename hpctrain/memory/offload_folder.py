"""Folder for the files of offloaded tensors, and when it is deleted.

Every rank makes a folder of its own in it, named after its host and process, and deletes it at its end. The
next run deletes folders that a crash left. The offload folder itself is deleted with the last of them if it
was made for offloading. Nothing else in these folders is deleted.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, ENOTDIR
from pathlib import Path

from hpctrain.comm.error_messages import describe_os_error
from hpctrain.errors import HpctrainError
from hpctrain.files import delete_folder, files_named
from hpctrain.units import format_bytes

_PREFIX = "offload"
_FOLDER = re.compile(rf"{_PREFIX}-.+-\d+-\d+-rank\d+-\w+")
FILE_NAME = r"[a-z]+(-\d+)?"  # name of a file with offloaded memory

_MARKER = ".hpctrain-offload"  # name of an empty file in an offload folder that was made for offloading
_ENDED_STATES = ("Z", "X")  # states in /proc of processes that have ended


def make_scratch(folder: Path, rank: int) -> Path:
    """Make and return a new folder of this process in the offload folder, which is made if it does not exist.

    Raises:
        HpctrainError: The folder cannot be made.
    """
    with _as_user_error(folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():
                raise
        else:
            (folder / _MARKER).touch()
        process = f"{_PREFIX}-{_host()}-{os.getpid()}-{_start_time(os.getpid())}"
        return Path(tempfile.mkdtemp(prefix=f"{process}-rank{rank}-", dir=folder))


def check_disk_space(folder: Path, required_bytes: int) -> None:
    """Check that `required_bytes` fit on the disk of a folder, which may not exist yet. Makes nothing.

    Files that earlier processes left there are deleted first.

    Args:
        folder: Offload folder.
        required_bytes: Bytes that all ranks that share the disk will write.

    Raises:
        HpctrainError: The folder cannot be written to, or the disk is too small.
    """
    with _as_user_error(folder):
        remove_leftovers(folder)
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(existing))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES), str(existing))
        status = os.statvfs(existing)
        free = status.f_bavail * status.f_frsize
        if free < required_bytes:
            raise HpctrainError(
                f"{folder}: offloading requires {format_bytes(required_bytes)} on this disk, which has "
                f"{format_bytes(free)} free (use another folder in memory.offload_dir)"
            )


def remove_leftovers(folder: Path) -> None:
    """Delete what processes of this host that have ended, such as crashed runs, left in an offload folder."""
    process = re.compile(rf"{_PREFIX}-{re.escape(_host())}-(\d+)-([^-]*)-.*")
    for leftover in folder.glob(f"{_PREFIX}-*"):
        match = process.fullmatch(leftover.name)
        if match and _start_time(int(match[1])) != match[2]:
            delete_scratch(leftover)


def delete_scratch(folder: Path) -> bool:
    """Delete the files of one process and their folder. Return True if it was such a folder and is gone."""
    if not _FOLDER.fullmatch(folder.name):
        return False
    with suppress(OSError):
        return not delete_folder(folder, files_named(FILE_NAME))
    return False


def is_scratch(entry: os.DirEntry[str]) -> bool:
    """Return True if the name of an entry of an offload folder is one that this module gives."""
    return entry.name == _MARKER or bool(_FOLDER.fullmatch(entry.name))


def delete_offload_folder(folder: Path) -> None:
    """Delete an offload folder, if it was made for offloading and is empty."""
    with suppress(OSError):
        if os.listdir(folder) == [_MARKER]:  # noqa: PTH208  (only names are needed)
            delete_folder(folder, files_named(re.escape(_MARKER)))


@contextmanager
def _as_user_error(folder: Path) -> Iterator[None]:
    """Turn an OSError into an HpctrainError."""
    try:
        yield
    except OSError as error:
        raise HpctrainError(
            f"{folder}: cannot be written to for offloading: {describe_os_error(error)} (use another "
            "folder in memory.offload_dir)"
        ) from None


def _host() -> str:
    return socket.gethostname().replace("/", "_")


def _start_time(pid: int) -> str | None:
    """Return when a process of this host started; None if it does not exist or has ended.

    With it, a later process with the same number is recognized as another one.
    """
    try:
        # The second field, the command's name in parentheses, may hold blanks.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if fields[0] in _ENDED_STATES else fields[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "0"
