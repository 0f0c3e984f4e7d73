"""Files that anybody may have named or written, read within bounds; files that have to survive a crash; and
deleting those that were written here, by name."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.characters import control_problem, escaped
from hpctrain.errors import HpctrainError, InputOutputError

JSON_BYTES = 64 << 20  # of a JSON file at most; the largest tokenizers have half of it
_CHUNK = 1 << 20


def check_output(path: Path, replace: bool) -> None:
    """HpctrainError where no file can be made of this name, or one is there that is not to be replaced."""
    problem = control_problem(str(path))
    if not problem and path.is_dir():
        problem = "is a folder; name the file to be made"
    if not problem and path.exists() and not replace:
        problem = "exists already; --force replaces it"
    if problem:
        raise HpctrainError(f"{escaped(str(path))}: {problem}")


def identity(path: str | Path) -> object:
    """What all names of a file have in common, of any kind of link; where there is none, where it leads."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a name as it is written
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def distinct(paths: Iterable[Path]) -> list[Path]:
    """The paths, each file or folder once, by the first of its names."""
    first: dict[object, Path] = {}
    for path in paths:
        first.setdefault(identity(path), path)
    return list(first.values())


def require_writable(path: Path) -> None:
    """HpctrainError or OSError where no file of this name could be written, or written over: for what is made
    last, before the work that it tells of is done. Nothing is made here.
    """
    check_output(path, replace=True)
    there = path if path.exists() else path.parent
    if there != path and not there.is_dir():
        reason = errno.ENOTDIR if there.exists() else errno.ENOENT
    elif not os.access(there, os.W_OK if there == path else os.W_OK | os.X_OK):
        reason = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
    else:
        return
    raise InputOutputError(f"{escaped(str(path))}: cannot be written: {os.strerror(reason)} ({there})")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading, at once.

    OSError for what is no regular file (a folder, a pipe, a device), and for a name that no file can have.
    """
    try:
        # Even opening would wait for a pipe's writer, or move a tape.
        _require_regular(Path(path).stat(), path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # a null character, or half of a pair of UTF-16
        raise OSError(errno.EINVAL, "no file can have such a name", str(path)) from None
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | Path, most: int) -> bytes:
    """All of a regular file of at most `most` bytes; OSError as from `open_regular`, or if it has more."""
    content = bytearray()
    with open_regular(path) as stream:
        while chunk := stream.read(_CHUNK):
            content += chunk
            if len(content) > most:
                raise OSError(errno.EFBIG, f"too large: more than {most} bytes", str(path))
    return bytes(content)


def read_text(path: str | Path, most: int) -> str:
    """Return the UTF-8 text of a regular file of at most `most` bytes.

    A byte order mark at its beginning is skipped, and every kind of line end becomes a newline.

    Raises:
        OSError: As `read_bytes`.
        UnicodeDecodeError: The file is not UTF-8 text (a ValueError).
    """
    return read_bytes(path, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says; ValueError for all that is wrong with it, also where it nests too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # Python tells how to have it read numbers of any length
        raise ValueError("a number has too many digits") from None


def finite(value: Any) -> Any:
    """The value; None for a float that JSON has no number for, also within lists and objects."""
    if isinstance(value, list):
        return [finite(each) for each in value]
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def strict_json(row: Mapping[str, Any], indent: int | None = None) -> str:
    """A JSON object; null stands for a float that JSON has no number for."""
    return json.dumps({name: finite(value) for name, value in row.items()}, indent=indent, allow_nan=False)


def add_lines(descriptor: int, lines: Iterable[str]) -> None:
    """Add lines to a text file that is open to read and write, all at once, and behind the end of a last one
    that is torn, as whoever wrote it was killed, or had no room. OSError where there is none now.
    """
    size = os.fstat(descriptor).st_size
    torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    with os.fdopen(descriptor, "ab", closefd=False) as file:
        file.write(b"\n" * torn + "".join(f"{line}\n" for line in lines).encode())


def is_unfit(error: OSError) -> bool:
    """Whether what was named could never be read as a file, rather than is missing or fails."""
    return error.errno in {errno.EINVAL, errno.EFBIG, errno.ENAMETOOLONG}


@contextmanager
def descriptor_of(path: str | Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """The descriptor of a file or folder that is open inside; OSError where it cannot be opened."""
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the name of a file to `OSError`s of the block, which only have one if opening a file failed."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file; an OSError names it."""
    with naming(path):
        path.write_text(text, encoding="utf-8")


def synchronize(path: Path) -> None:
    """Bring a file or folder, as this node knows it, to the disk; an OSError names it."""
    with naming(path), descriptor_of(path) as descriptor:
        os.fsync(descriptor)


def files_named(pattern: str) -> Callable[[os.DirEntry[str]], bool]:
    """Tells regular files, not links, whose whole names match a regular expression."""
    compiled = re.compile(pattern)
    return lambda entry: bool(compiled.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)


def delete_files(folder: Path, ours: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Delete what `ours` tells of a folder's files and links; the names of the rest, sorted.

    The folder is opened once, and neither it nor what is in it is followed where it is a link: whatever they
    are exchanged for meanwhile stays. OSError where it is no folder, or something cannot be deleted.
    """
    with descriptor_of(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
        with os.scandir(descriptor) as entries:
            contents = [(entry.name, ours(entry)) for entry in entries]
        for name, own in contents:
            if own:
                os.unlink(name, dir_fd=descriptor)
    return sorted(name for name, own in contents if not own)


def delete_folder(folder: Path, ours: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Delete what `ours` tells and then the folder, if nothing else is in it; as `delete_files`."""
    rest = delete_files(folder, ours)
    if not rest:
        folder.rmdir()
    return rest


def _require_regular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def user_cache() -> Path:
    """Return the folder for cached data of hpctrain: `hpctrain` in the user's cache folder (XDG)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if given.startswith("/") else Path(os.environ.get("HOME", "")) / ".cache"
    return folder / "hpctrain"
