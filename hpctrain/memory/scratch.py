"""Flat tensors in temporary files, which threads read and write.

Every rank has its files in a folder of its own (`memory/offload_folder.py`), which is deleted when the rank
ends.
"""

from __future__ import annotations

import os
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.errors import InputOutputError
from hpctrain.host.device import on_host
from hpctrain.memory.offload_folder import FILE_NAME, delete_offload_folder, delete_scratch, make_scratch
from hpctrain.units import format_bytes

THREADS = 4
"""Threads of a rank that read and write files."""
_LARGEST_CALL = 1 << 30
"""Largest number of bytes of one system call. Linux transfers less than 2 GiB at a time."""


Transfer = Future[None]
"""Started read or write. `result` waits for it, and raises InputOutputError if it failed."""


class ScratchFile:
    """File of a ScratchFiles, with allocated disk space. Tensors must be contiguous and in host memory."""

    def __init__(self, path: Path, size: int, threads: ThreadPoolExecutor, descriptor: int) -> None:
        self.path, self.size = path, size
        self._threads, self._descriptor = threads, descriptor

    def start_read(self, offset: int, tensor: Tensor) -> Transfer:
        """Start to fill a tensor from the byte `offset` on. The tensor must not be used before the end."""
        return self._threads.submit(self._move, offset, _bytes_of(tensor), writing=False)

    def start_write(self, offset: int, tensor: Tensor) -> Transfer:
        """Start to write a tensor at the byte `offset`. The tensor must not be changed before the end."""
        return self._threads.submit(self._move, offset, _bytes_of(tensor), writing=True)

    def _move(self, offset: int, memory: memoryview, *, writing: bool) -> None:
        self._check(offset, memory.nbytes)
        move = os.pwritev if writing else os.preadv
        try:
            while memory:
                count = move(self._descriptor, [memory[:_LARGEST_CALL]], offset)
                if count == 0:
                    raise self._file_error("was truncated during the run")
                memory, offset = memory[count:], offset + count
        except OSError as error:
            raise self._file_error(f"cannot be {'written' if writing else 'read'}", error) from None

    def _check(self, offset: int, count: int) -> None:
        """Raise InputOutputError if the file was removed or truncated.

        This process can still read a file that was removed, but its contents would vanish with the process.
        """
        assert offset >= 0 and offset + count <= self.size, (self.path, offset, count, self.size)
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise self._file_error("cannot be read", error) from None
        if status.st_nlink == 0:
            raise self._file_error("was removed during the run")
        if status.st_size < self.size:
            raise self._file_error("was truncated during the run")

    def _file_error(self, what: str, error: OSError | None = None) -> InputOutputError:
        why = "" if error is None else f": {error.strerror or error}"
        return InputOutputError(
            f"{self.path}: the file of offloaded memory {what}{why} (continue from the last checkpoint "
            "with `hpctrain resume`)"
        )


class ScratchSlice(ABC):
    """Flat tensor of `length` elements of type `dtype` in a file. A slice with step 1 is in the same file."""

    length: int
    dtype: torch.dtype

    @abstractmethod
    def __getitem__(self, part: slice) -> ScratchSlice: ...

    @abstractmethod
    def load(self) -> Tensor:
        """Return the tensor in new memory."""

    def numel(self) -> int:
        """Return the number of elements."""
        return self.length

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.length * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """Device on which `load` puts the tensor."""
        return torch.device("cpu")


class ScratchTensor(ScratchSlice):
    """Flat tensor in a ScratchFile, from the byte `offset` on. Empty ones are never read or written."""

    def __init__(self, file: ScratchFile, offset: int, length: int, dtype: torch.dtype) -> None:
        self.file, self.offset, self.length, self.dtype = file, offset, length, dtype

    @override
    def __getitem__(self, part: slice) -> ScratchTensor:
        first, last, step = part.indices(self.length)
        assert step == 1
        start = self.offset + first * self.dtype.itemsize
        return ScratchTensor(self.file, start, max(0, last - first), self.dtype)

    def start_read(self, tensor: Tensor) -> Transfer:
        """Start to fill a tensor of the same length and dtype. The tensor must not be used before the end."""
        assert (tensor.numel(), tensor.dtype) == (self.length, self.dtype)
        return self.file.start_read(self.offset, tensor)

    def start_write(self, tensor: Tensor) -> Transfer:
        """Start to write a tensor of the same length and dtype, which must not be changed before the end."""
        assert (tensor.numel(), tensor.dtype) == (self.length, self.dtype)
        return self.file.start_write(self.offset, tensor)

    def zero_(self) -> None:
        """Write zeros, like torch's `zero_`."""
        for _, tensor in fill_pieces(self):
            tensor.zero_()

    @override
    def load(self) -> Tensor:
        tensor = torch.empty(self.length, dtype=self.dtype)
        self.start_read(tensor).result()
        return tensor

    def copy_(self, values: Tensor) -> None:
        """Write values, like torch's `copy_`."""
        self.start_write(values.to(self.dtype)).result()


Flat = Tensor | ScratchTensor  # flat tensor, in memory or in a file


def storage_bytes(tensors: Iterable[Flat | None]) -> int:
    """Return the bytes of the memory of tensors. Each storage counts once; tensors in files count 0."""
    storages = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


PIECE_BYTES = 16 << 20
"""Size of the pieces in which whole tensors in files are read or written, where speed does not matter."""


def fill_pieces(flat: Flat) -> Iterator[tuple[int, Tensor]]:
    """Yield first element and memory of each piece of a flat tensor, for the caller to overwrite.

    A piece in a file is written when the next one is requested. A tensor in memory is one piece.
    """
    for first, tensor, part in _pieces(flat):
        yield first, tensor
        if part is not None:
            part.copy_(tensor)


def read_pieces(flat: Flat) -> Iterator[tuple[int, Tensor]]:
    """Yield first element and contents of each piece of a flat tensor, valid until the next is requested."""
    for first, tensor, part in _pieces(flat):
        if part is not None:
            part.start_read(tensor).result()
        yield first, tensor


def _pieces(flat: Flat) -> Iterator[tuple[int, Tensor, ScratchTensor | None]]:
    """Yield first element and memory of each piece, and its place in the file or None."""
    if isinstance(flat, Tensor):
        yield 0, flat, None
        return
    step = max(1, PIECE_BYTES // flat.element_size())
    memory = torch.empty(min(step, flat.numel()), dtype=flat.dtype)
    for first in range(0, flat.numel(), step):
        part = flat[first : first + step]
        yield first, memory[: part.numel()], part


class ScratchFiles:
    """Files of this rank in the offload folder, deleted by `close` and at the end of the process.

    Args:
        folder: Offload folder; a folder for this rank is made in it.
        rank: Number of this rank.

    Raises:
        HpctrainError: The folder cannot be made.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = make_scratch(folder, rank)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="offload")
        self._descriptors: list[int] = []
        self._end = weakref.finalize(
            self, _remove, folder, self.folder, self._threads, self._descriptors, os.getpid()
        )

    def file(self, name: str, size: int) -> ScratchFile:
        """Return a new file of `size` zero bytes, whose disk space is allocated.

        Raises:
            InputOutputError: The disk is full.
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
        """Wait for started transfers, and delete all files."""
        self._end()


def _remove(
    parent: Path, folder: Path, threads: ThreadPoolExecutor, descriptors: list[int], owner: int
) -> None:
    if os.getpid() != owner:
        return  # a forked child must not delete the files of its parent
    threads.shutdown()
    for descriptor in descriptors:
        os.close(descriptor)
    delete_scratch(folder)
    delete_offload_folder(parent)


def _bytes_of(tensor: Tensor) -> memoryview:
    assert on_host(tensor.device) and tensor.is_contiguous()
    # View it as bytes, since numpy lacks some of torch's dtypes.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
