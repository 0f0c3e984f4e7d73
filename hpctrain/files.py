"""Reading of untrusted files within bounds, durable writing, and deletion of files by name.

All functions are local calls.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.text import control_problem, escaped, kind_of

JSON_BYTES = 64 << 20
"""Largest size of a JSON file, in bytes. Those of the largest tokenizers have half of it."""
_CHUNK = 1 << 20


def path_of(value: object, name: str, what: str = "a file") -> Path:
    """Return the path that a script passes as an argument.

    Args:
        value: The argument.
        name: Name of the argument, for the message.
        what: What the path should name, with an article, for the message.

    Raises:
        HpctrainError: The argument is not a path, or is empty.
    """
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise HpctrainError(f"{name}: must be the path of {what}, not {kind_of(value)}")
    return Path(value)


def check_output(path: Path, replace: bool) -> None:
    """Check that an output file may be made. Nothing is created; the folder is not examined.

    Args:
        path: The output file.
        replace: True if it may replace an existing file.

    Raises:
        HpctrainError: The name has control characters, is that of a folder, or exists and may not be
            replaced.
    """
    problem = control_problem(str(path))
    if not problem and path.is_dir():
        problem = "is a folder (name a file)"
    if not problem and path.exists() and not replace:
        problem = "already exists (--force replaces it)"
    if problem:
        raise HpctrainError(f"{escaped(str(path))}: {problem}")


def file_identity(path: str | Path) -> object:
    """Return a hashable key that is equal for all names and links of one file or folder.

    The key is the device and inode, or the real path if the file cannot be examined, as when it is missing.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - a name as it is written
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def distinct(paths: Iterable[Path]) -> list[Path]:
    """Return the paths, in order, without those that lead to the same file or folder as an earlier one."""
    first: dict[object, Path] = {}
    for path in paths:
        first.setdefault(file_identity(path), path)
    return list(first.values())


def require_writable(path: Path) -> None:
    """Check before long work that its output file can be written, without making the file.

    Raises:
        HpctrainError: The file cannot be made or replaced (an InputOutputError if the system refuses it).
        OSError: The file system cannot be examined.
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
    """Open a regular file for reading, without waiting. The caller closes it.

    Raises:
        OSError: The path is not a regular file but a folder, a pipe or a device, is not a valid name, or
            cannot be opened.
    """
    try:
        # To open a pipe would wait for its writer, to open a tape would move it.
        _require_regular(Path(path).stat(), path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # a null character, or half of a pair of UTF-16
        raise OSError(errno.EINVAL, "not a valid file name", str(path)) from None
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | Path, most: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        most: Largest size in bytes.

    Raises:
        OSError: As `open_regular`, or the file is larger.
    """
    content = bytearray()
    with open_regular(path) as stream:
        while chunk := stream.read(_CHUNK):
            content += chunk
            if len(content) > most:
                raise OSError(errno.EFBIG, f"too large: more than {most} bytes", str(path))
    return bytes(content)


def read_text(path: str | Path, most: int) -> str:
    """Return the UTF-8 text of a regular file.

    A byte order mark at its beginning is skipped, and every kind of line end becomes a newline.

    Args:
        path: The file.
        most: Largest size in bytes.

    Raises:
        OSError: As `read_bytes`.
        UnicodeDecodeError: The file is not UTF-8 text (a ValueError).
    """
    return read_bytes(path, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has a number with too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # its message explains a setting of Python, which users cannot change here
        raise ValueError("a number has too many digits") from None


def finite(value: Any) -> Any:
    """Return a copy of a value with None for each infinite or NaN float, also inside lists and dicts.

    Tuples and other objects are returned as they are.
    """
    if isinstance(value, list):
        return [finite(each) for each in value]
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def strict_json(row: Mapping[str, Any], indent: int | None = None) -> str:
    """Return the JSON text of an object, with null for infinite and NaN floats, which JSON does not have.

    Args:
        row: The object, whose values JSON can express.
        indent: Spaces of each level; None for one line.
    """
    return json.dumps({name: finite(value) for name, value in row.items()}, indent=indent, allow_nan=False)


def add_lines(descriptor: int, lines: Iterable[str]) -> None:
    """Append lines to an open text file in one write.

    If the last line is incomplete, because its writer was killed or the disk was full, it is ended first.

    Args:
        descriptor: Descriptor of a file that is open for reading and appending.
        lines: The lines, without newlines.

    Raises:
        OSError: The file cannot be written.
    """
    size = os.fstat(descriptor).st_size
    torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    with os.fdopen(descriptor, "ab", closefd=False) as file:
        file.write(b"\n" * torn + "".join(f"{line}\n" for line in lines).encode())


def is_unfit(error: OSError) -> bool:
    """Return True if a file cannot be read because of what it is, not because it is missing or a read failed.

    This is so for a file that is not regular or is too large, and for a name that is not valid or too long. A
    folder does not count.
    """
    return error.errno in {errno.EINVAL, errno.EFBIG, errno.ENAMETOOLONG}


@contextmanager
def descriptor_of(path: str | Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Return a context manager that opens a file or folder, yields its descriptor, and closes it.

    Args:
        path: The file or folder.
        flags: Flags of open(2). A file that it creates is not executable.

    Raises:
        OSError: It cannot be opened. The error names it.
    """
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Return a context manager that adds a path to an OSError of its block, and raises it again.

    Errors that already name a file are raised as they are; by itself an OSError names one only if opening
    failed.

    Args:
        path: The file that the block reads or writes.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8. An existing file is overwritten in place, and nothing is flushed.

    Raises:
        OSError: The file cannot be written. The error names it.
    """
    with naming(path):
        path.write_text(text, encoding="utf-8")


def flush_to_disk(path: Path) -> None:
    """Flush what this node has written of a file or folder to the disk (fsync), which may take long.

    Raises:
        OSError: It cannot be opened or flushed. The error names it.
    """
    with naming(path), descriptor_of(path) as descriptor:
        os.fsync(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is complete, or what it was before.

    Raises:
        OSError: It cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    flush_to_disk(path.parent)


def files_named(pattern: str) -> Callable[[os.DirEntry[str]], bool]:
    """Return a test for regular files, not links, whose names match a regular expression as a whole.

    Args:
        pattern: The expression.

    Returns:
        Function of an entry of `os.scandir`, as `delete_files` takes it.
    """
    compiled = re.compile(pattern)
    return lambda entry: bool(compiled.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)


def delete_files(folder: Path, ours: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Delete files and links in a folder, and return the sorted names of all other entries.

    The folder is opened once and no links are followed. If another process replaces the folder by a link
    meanwhile, nothing elsewhere is deleted.

    Args:
        folder: The folder; it stays.
        ours: Test that is True for an entry that is deleted.

    Raises:
        OSError: The path is not a folder, or an entry cannot be deleted. Entries before it are then deleted.
    """
    with descriptor_of(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
        with os.scandir(descriptor) as entries:
            contents = [(entry.name, ours(entry)) for entry in entries]
        for name, own in contents:
            if own:
                os.unlink(name, dir_fd=descriptor)
    return sorted(name for name, own in contents if not own)


def delete_folder(folder: Path, ours: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Delete files as `delete_files` does, and then the folder if it is empty.

    Args:
        folder: The folder.
        ours: Test that is True for an entry that is deleted.

    Returns:
        The sorted names of the entries that remain; [] if the folder itself was deleted.

    Raises:
        OSError: The path is not a folder, or an entry or the folder cannot be deleted.
    """
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
    """Return the folder for cached data of hpctrain: `hpctrain` in the user's cache folder (XDG).

    The folder is not made, and may be missing.
    """
    setting = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(setting) if setting.startswith("/") else Path(os.environ.get("HOME", "")) / ".cache"
    return folder / "hpctrain"
