"""Files that stand in for memory: flat tensors that wait on a disk, read and written by threads of their own.

Every rank has a folder of its own in the offload folder, named after its host and process. It goes when
the rank leaves; what a crash leaves behind goes when the next run starts there. The offload folder goes
with the last of them, where it was made for them. Nothing else that lies in these folders is deleted.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from errno import EACCES, ENOTDIR
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.comm.device import on_host
from hpctrain.comm.outcome import describe
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import delete_folder, files_named
from hpctrain.units import format_bytes

THREADS = 4
_PREFIX = "offload"
_FOLDER = re.compile(rf"{_PREFIX}-.+-\d+-\d+-rank\d+-\w+")
_FILE = files_named(r"[a-z]+(-\d+)?")

_MADE = ".hpctrain-offload"  # name of an empty file in an offload folder that was made for offloading
_ENDED = ("Z", "X")  # how /proc calls processes that are no more
_LARGEST_CALL = 1 << 30


Transfer = Future[None]
"""A read or write under way; `result` waits for it: InputOutputError, with file and cause, if it failed."""


class ScratchFile:
    """A file of a ScratchFiles, whose space is taken. Its tensors are contiguous, in host memory."""

    def __init__(self, path: Path, size: int, threads: ThreadPoolExecutor, descriptor: int) -> None:
        self.path, self.size = path, size
        self._threads, self._descriptor = threads, descriptor

    def start_read(self, offset: int, tensor: Tensor) -> Transfer:
        """Start to fill a tensor from the file's byte `offset` on; it is not to be used until then."""
        return self._threads.submit(self._move, offset, _memory(tensor), writing=False)

    def start_write(self, offset: int, tensor: Tensor) -> Transfer:
        """Start to write a tensor at the file's byte `offset`; it is not to be changed until then."""
        return self._threads.submit(self._move, offset, _memory(tensor), writing=True)

    def _move(self, offset: int, memory: memoryview, *, writing: bool) -> None:
        self._check(offset, memory.nbytes)
        move = os.pwritev if writing else os.preadv
        try:
            while memory:
                count = move(self._descriptor, [memory[:_LARGEST_CALL]], offset)
                if count == 0:
                    raise self._lost("was cut short while the run needed it")
                memory, offset = memory[count:], offset + count
        except OSError as error:
            raise self._lost(f"cannot be {'written' if writing else 'read'}", error) from None

    def _check(self, offset: int, count: int) -> None:
        """A file that was removed can still be read here, yet its contents would vanish with this process."""
        assert offset >= 0 and offset + count <= self.size, (self.path, offset, count, self.size)
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise self._lost("cannot be read", error) from None
        if status.st_nlink == 0:
            raise self._lost("was removed while the run needed it")
        if status.st_size < self.size:
            raise self._lost("was cut short while the run needed it")

    def _lost(self, what: str, error: OSError | None = None) -> InputOutputError:
        why = "" if error is None else f": {error.strerror or error}"
        return InputOutputError(
            f"{self.path}: this file of offloaded memory {what}{why}; "
            "the run can go on from its last checkpoint (`hpctrain resume`)"
        )


class OnDisk(ABC):
    """A flat tensor in a file: `length` elements of type `dtype`. Slices, with step 1, lie there too."""

    length: int
    dtype: torch.dtype

    @abstractmethod
    def __getitem__(self, part: slice) -> OnDisk: ...

    @abstractmethod
    def load(self) -> Tensor:
        """Read into new memory."""

    def numel(self) -> int:
        """Elements."""
        return self.length

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.length * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """Where `load` puts it."""
        return torch.device("cpu")


class ScratchTensor(OnDisk):
    """A flat tensor in a ScratchFile, from the byte `offset` on. Empty ones are never read or written."""

    def __init__(self, file: ScratchFile, offset: int, length: int, dtype: torch.dtype) -> None:
        self.file, self.offset, self.length, self.dtype = file, offset, length, dtype

    def __getitem__(self, part: slice) -> ScratchTensor:
        first, last, step = part.indices(self.length)
        assert step == 1
        start = self.offset + first * self.dtype.itemsize
        return ScratchTensor(self.file, start, max(0, last - first), self.dtype)

    def start_read(self, tensor: Tensor) -> Transfer:
        """Start to fill a tensor of this length and type; as ScratchFile.start_read."""
        assert (tensor.numel(), tensor.dtype) == (self.length, self.dtype)
        return self.file.start_read(self.offset, tensor)

    def start_write(self, tensor: Tensor) -> Transfer:
        """Start to write a tensor of this length and type; as ScratchFile.start_write."""
        assert (tensor.numel(), tensor.dtype) == (self.length, self.dtype)
        return self.file.start_write(self.offset, tensor)

    def zero_(self) -> None:
        """Write zeros, as torch's `zero_` does."""
        for _, tensor in to_fill(self):
            tensor.zero_()

    def load(self) -> Tensor:
        """Read into new memory."""
        tensor = torch.empty(self.length, dtype=self.dtype)
        self.start_read(tensor).result()
        return tensor

    def store(self, tensor: Tensor) -> None:
        """Write, and wait for it."""
        self.start_write(tensor).result()


Flat = Tensor | ScratchTensor  # a flat tensor, in memory or in a file

PIECE_BYTES = 16 << 20  # memory for what is read or written a piece at a time, where speed does not matter


def to_fill(flat: Flat) -> Iterator[tuple[int, Tensor]]:
    """First element and memory of all pieces of a flat tensor, to be overwritten.

    What is in a file is written when the next piece is asked for. What is in memory is one piece.
    """
    for first, tensor, part in _pieces(flat):
        yield first, tensor
        if part is not None:
            part.store(tensor)


def to_read(flat: Flat) -> Iterator[tuple[int, Tensor]]:
    """First element and contents of all pieces of a flat tensor, each valid until the next is asked for."""
    for first, tensor, part in _pieces(flat):
        if part is not None:
            part.start_read(tensor).result()
        yield first, tensor


def _pieces(flat: Flat) -> Iterator[tuple[int, Tensor, ScratchTensor | None]]:
    """First element, memory and, of what is in a file, the pieces of it."""
    if isinstance(flat, Tensor):
        yield 0, flat, None
        return
    step = max(1, PIECE_BYTES // flat.element_size())
    memory = torch.empty(min(step, flat.numel()), dtype=flat.dtype)
    for first in range(0, flat.numel(), step):
        part = flat[first : first + step]
        yield first, memory[: part.numel()], part


class ScratchFiles:
    """This rank's files in the offload folder, gone after `close` and at the process's end."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Make a folder for this rank's files. HpctrainError where that cannot be."""
        with _reported(folder):
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                if not folder.is_dir():
                    raise
            else:
                (folder / _MADE).touch()
            process = f"{_PREFIX}-{_host()}-{os.getpid()}-{_start_time(os.getpid())}"
            self.folder = Path(tempfile.mkdtemp(prefix=f"{process}-rank{rank}-", dir=folder))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="offload")
        self._descriptors: list[int] = []
        self._end = weakref.finalize(
            self, _remove, folder, self.folder, self._threads, self._descriptors, os.getpid()
        )

    def file(self, name: str, size: int) -> ScratchFile:
        """A new file of `size` bytes, zeros, whose space on the disk is taken at once.

        InputOutputError where the disk does not have it.
        """
        path = self.folder / name
        assert re.fullmatch(r"[a-z]+(-\d+)?", name), name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._descriptors.append(descriptor)
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise InputOutputError(
                f"{path}: cannot take {format_bytes(size)} of the disk for offloading: "
                f"{error.strerror or error}"
            ) from None
        return ScratchFile(path, size, self._threads, descriptor)

    def close(self) -> None:
        """Wait for what is under way and remove all files."""
        self._end()


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
                f"{folder}: offloading needs {format_bytes(need)} on this disk, which has "
                f"{format_bytes(free)} free (memory.offload_dir may name another folder)"
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
        return not delete_folder(folder, _FILE)
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
            f"{folder}: cannot be written to for offloading: {describe(error)} "
            "(memory.offload_dir may name another folder)"
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


def _remove(
    parent: Path, folder: Path, threads: ThreadPoolExecutor, descriptors: list[int], owner: int
) -> None:
    if os.getpid() != owner:
        return  # a forked child, which leaves its parent's files alone
    threads.shutdown()
    for descriptor in descriptors:
        os.close(descriptor)
    delete_scratch(folder)
    delete_offload_folder(parent)


def _memory(tensor: Tensor) -> memoryview:
    assert on_host(tensor.device) and tensor.is_contiguous()
    # A view of bytes, since numpy does not know all of torch's types.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
