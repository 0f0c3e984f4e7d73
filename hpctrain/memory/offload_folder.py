"""The folder where ranks put what is not to stay in memory, and what is deleted there when.

Every rank has a folder of its own in it, named after its host and process. It goes when the rank leaves; what
a crash leaves behind goes when the next run starts there. The offload folder goes with the last of them,
where it was made for them. Nothing else that lies in these folders is deleted.
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
FILE_NAME = r"[a-z]+(-\d+)?"  # of a file with what a rank has put out of memory

_MADE = ".hpctrain-offload"  # name of an empty file in an offload folder that was made for offloading
_ENDED = ("Z", "X")  # how /proc calls processes that are no more


def make_scratch(folder: Path, rank: int) -> Path:
    """A new folder of this process in the offload folder, which is made where it is not there yet.

    HpctrainError where that cannot be.
    """
    with _reported(folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():
                raise
        else:
            (folder / _MADE).touch()
        process = f"{_PREFIX}-{_host()}-{os.getpid()}-{_start_time(os.getpid())}"
        return Path(tempfile.mkdtemp(prefix=f"{process}-rank{rank}-", dir=folder))


def check_room(folder: Path, need: int) -> None:
    """Look whether `need` bytes will fit into a folder that may not be there yet; nothing is made.

    `need` is what all ranks that share the disk will ask for. HpctrainError if the folder cannot be written
    to or is too small. What earlier processes left there is removed first.
    """
    with _reported(folder):
        remove_leftovers(folder)
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(there))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES), str(there))
        status = os.statvfs(there)
        free = status.f_bavail * status.f_frsize
        if free < need:
            raise HpctrainError(
                f"{folder}: offloading requires {format_bytes(need)} on this disk, which has "
                f"{format_bytes(free)} free (use another folder in memory.offload_dir)"
            )


def remove_leftovers(folder: Path) -> None:
    """Remove the files of processes of this host that are no more."""
    process = re.compile(rf"{_PREFIX}-{re.escape(_host())}-(\d+)-([^-]*)-.*")
    for left in folder.glob(f"{_PREFIX}-*"):
        match = process.fullmatch(left.name)
        if match and _start_time(int(match[1])) != match[2]:
            delete_scratch(left)


def delete_scratch(folder: Path) -> bool:
    """Delete the files of one process and their folder; whether it was such a folder and is gone."""
    if not _FOLDER.fullmatch(folder.name):
        return False
    with suppress(OSError):
        return not delete_folder(folder, files_named(FILE_NAME))
    return False


def is_scratch(entry: os.DirEntry[str]) -> bool:
    """Whether an entry of an offload folder was made here, by its name."""
    return entry.name == _MADE or bool(_FOLDER.fullmatch(entry.name))


def delete_offload_folder(folder: Path) -> None:
    """Delete an offload folder, if it was made for offloading and nothing is in it any more."""
    with suppress(OSError):
        if os.listdir(folder) == [_MADE]:  # noqa: PTH208  (names are all that is wanted)
            delete_folder(folder, files_named(re.escape(_MADE)))


@contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """What the system refuses, as the user's mistake."""
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
    """When a process of this host started, so that a later one of the same number is another one; None where
    there is none, or one that has ended and waits for its parent to look."""
    try:
        # The second field, the command's name in parentheses, may hold blanks.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if fields[0] in _ENDED else fields[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "0"
