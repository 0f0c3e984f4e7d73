"""Files that stand in for memory: flat tensors that wait on a disk, read and written by threads of their own.

Every rank has them in a folder of its own (`memory/offload_folder.py`), which goes when the rank leaves.
"""

from __future__ import annotations

import os
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.errors import InputOutputError
from hpctrain.host.device import on_host
from hpctrain.memory.offload_folder import FILE_NAME, delete_offload_folder, delete_scratch, make_scratch
from hpctrain.units import format_bytes

THREADS = 4
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
                    raise self._lost("was truncated during the run")
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
            raise self._lost("was removed during the run")
        if status.st_size < self.size:
            raise self._lost("was truncated during the run")

    def _lost(self, what: str, error: OSError | None = None) -> InputOutputError:
        why = "" if error is None else f": {error.strerror or error}"
        return InputOutputError(
            f"{self.path}: the file of offloaded memory {what}{why} (continue from the last checkpoint "
            "with `hpctrain resume`)"
        )


class ScratchSlice(ABC):
    """A flat tensor in a file: `length` elements of type `dtype`. Slices, with step 1, lie there too."""

    length: int
    dtype: torch.dtype

    @abstractmethod
    def __getitem__(self, part: slice) -> ScratchSlice: ...

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


class ScratchTensor(ScratchSlice):
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

    def copy_(self, values: Tensor) -> None:
        """Write them, as torch's `copy_` does."""
        self.start_write(values.to(self.dtype)).result()


Flat = Tensor | ScratchTensor  # a flat tensor, in memory or in a file

PIECE_BYTES = 16 << 20  # memory for what is read or written a piece at a time, where speed does not matter


def to_fill(flat: Flat) -> Iterator[tuple[int, Tensor]]:
    """First element and memory of all pieces of a flat tensor, to be overwritten.

    What is in a file is written when the next piece is asked for. What is in memory is one piece.
    """
    for first, tensor, part in _pieces(flat):
        yield first, tensor
        if part is not None:
            part.copy_(tensor)


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
        self.folder = make_scratch(folder, rank)
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
        if not re.fullmatch(FILE_NAME, name):
            raise ValueError(f"{name!r} is not a name of a scratch file")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._descriptors.append(descriptor)
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise InputOutputError(
                f"{path}: cannot allocate {format_bytes(size)} on the disk for offloading: "
                f"{error.strerror or error}"
            ) from None
        return ScratchFile(path, size, self._threads, descriptor)

    def close(self) -> None:
        """Wait for what is under way and remove all files."""
        self._end()


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
