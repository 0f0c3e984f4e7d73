"""Opening HDF5 files that anybody may have written.

A file of ours holds groups, and datasets whose bytes lie in one range of the file. Hard links join them.
Everything else that HDF5 knows is refused before it is followed or read: soft and external links, virtual and
chunked datasets, bytes in other files, attributes of other types. HDF5 crashes on some of these, reads files
that the user did not name, or allocates what the file says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.files import descriptor_of, naming, open_regular

DAMAGE = (
    OSError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)
"""Exceptions that h5py, and code which trusts what a file says, raise on a damaged or hostile file."""

SIGNATURE = b"\x89HDF\r\n\x1a\n"
"""First bytes of every HDF5 file of ours."""

_PAGE_BYTES = 1 << 16
MOST_ATTRIBUTE_BYTES = 1 << 16
"""Size limit of an attribute, in bytes: HDF5 keeps no larger ones in an object's header."""


@dataclass(frozen=True)
class LocalDataset:
    """A dataset whose bytes lie in one range of its own file.

    `shape` is () for a scalar. `offset` is the byte of the file at which the elements begin, 0 without any.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    identifier: h5py.h5d.DatasetID

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def read(self, most_bytes: int) -> NDArray[Any]:
        """Return all elements; ValueError if they are neither numbers nor short text, or too many bytes."""
        if self.dtype.kind not in "iufS" or self.elements * self.dtype.itemsize > most_bytes:
            raise ValueError(f"{self.name} has type {self.dtype} and shape {list(self.shape)}")
        values = np.empty(self.shape, self.dtype)
        if self.elements:
            self.identifier.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
        return values


class CheckedFile:
    """An open HDF5 file of which only local datasets and plain attributes can be read.

    All methods raise one of DAMAGE for a file that is damaged or holds something else. None communicates.
    """

    def __init__(self, file: h5py.File, size: int) -> None:
        """List the datasets of an open file of `size` bytes; ValueError if a link in it is not a hard one."""
        self._file, self._size = file, size
        names: list[str] = []

        def find_other_link(name: bytes, info: Any) -> str | None:
            if info.type == h5py.h5l.TYPE_HARD:
                return None
            return (
                f"/{_decode(name)} is {'a soft' if info.type == h5py.h5l.TYPE_SOFT else 'an external'} link"
            )

        def collect(name: bytes, info: Any) -> None:
            if info.type == h5py.h5o.TYPE_DATASET:
                names.append(f"/{_decode(name)}")

        # In any other order HDF5 sorts what a group holds, and crashes where it cannot read that.
        other_link = file.id.links.visit(
            find_other_link, idx_type=h5py.h5.INDEX_NAME, order=h5py.h5.ITER_NATIVE, info=True
        )
        if other_link is not None:
            raise ValueError(other_link)
        h5py.h5o.visit(file.id, collect, order=h5py.h5.ITER_NATIVE, info=True)
        self.datasets: frozenset[str] = frozenset(names)
        """Names of all datasets, each with its leading slash."""

    def dataset(self, name: str) -> LocalDataset:
        """Find a dataset; KeyError if there is none, ValueError if its bytes do not lie in this file."""
        if name not in self.datasets:
            raise KeyError(f"it has no dataset {name}")
        found = h5py.h5d.open(self._file.id, name.encode())
        creation = found.get_create_plist()
        if creation.get_layout() != h5py.h5d.CONTIGUOUS or creation.get_external_count():
            raise ValueError(f"{name} is not one contiguous range of the file")
        if found.get_space().get_simple_extent_type() == h5py.h5s.NULL:
            raise ValueError(f"{name} is empty")
        shape, dtype, offset = found.shape, found.dtype, found.get_offset()
        if not prod(shape):
            return LocalDataset(name, dtype, shape, 0, found)
        if offset is None or offset + prod(shape) * dtype.itemsize > self._size:
            raise ValueError(f"{name} reaches beyond the end of the file, which is truncated")
        return LocalDataset(name, dtype, shape, int(offset), found)

    def has_attribute(self, name: str, dataset: LocalDataset | None = None) -> bool:
        """Return whether a dataset, or the file, has an attribute."""
        return bool(h5py.h5a.exists(self._owner(dataset), name.encode()))

    def integer(self, name: str, dataset: LocalDataset | None = None) -> int:
        """Read an attribute that is one integer, of a dataset or of the file."""
        return int(_read_attribute(self._owner(dataset), name, "iu", "an integer"))

    def text(self, name: str, dataset: LocalDataset | None = None) -> str:
        """Read an attribute that is one text of fixed length, of a dataset or of the file."""
        return bytes(_read_attribute(self._owner(dataset), name, "S", "a text")).decode()

    def _owner(self, dataset: LocalDataset | None) -> h5py.h5g.GroupID | h5py.h5d.DatasetID:
        return h5py.h5g.open(self._file.id, b"/") if dataset is None else dataset.identifier


@contextmanager
def open_checked(path: Path) -> Iterator[CheckedFile]:
    """Open an HDF5 file for reading; one of DAMAGE for what is not a sound HDF5 file of local datasets.

    No lock is taken, since some file systems have none: a file of ours never changes once it has its name.
    """
    with open_regular(path) as stream:
        size = stream.seek(0, 2)
    with h5py.File(path, "r", locking=False) as file:
        yield CheckedFile(file, size)


@contextmanager
def open_for_writing(path: Path, mode: Literal["w", "r+"], **options: Any) -> Iterator[h5py.File]:
    """Open an HDF5 file that one process lays out or completes; OSError, with the file, if the disk fails.

    HDF5 does not survive that a write of its own fails: it ends the process, then or when that ends. So it
    writes into memory, and what it wrote goes to the file once HDF5 has closed it. That is for headers and
    small datasets: the memory is held until then.
    """
    flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if mode == "w" else 0)
    with naming(path), descriptor_of(path, flags) as descriptor:
        written = _PagesInMemory(descriptor)
        with h5py.File(written, mode, **options) as file:
            yield file
        written.store()


class _PagesInMemory:
    """File for h5py's driver of Python objects, which keeps the pages that are written in memory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._position = descriptor, 0
        self._size = os.fstat(descriptor).st_size
        self._pages: dict[int, bytearray] = {}

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (self._size if whence == os.SEEK_END else 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, count: int = -1) -> bytes:
        content = bytearray(self._size - self._position if count < 0 else count)
        return bytes(content[: self.readinto(content)])

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        for done, number, place, count in self._cut(len(view)):
            page = self._pages.get(number)
            content = self._load(number) if page is None else page
            view[done : done + count] = content[place : place + count]
        self._position += len(view)
        return len(view)

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for done, number, place, count in self._cut(len(view)):
            page = self._pages.get(number) or self._load(number)
            page[place : place + count] = view[done : done + count]
            self._pages[number] = page
        self._position += len(view)
        self._size = max(self._size, self._position)
        return len(view)

    def truncate(self, size: int) -> int:
        self._size = size
        return size

    def flush(self) -> None:
        """Do nothing: `store` writes."""

    def store(self) -> None:
        """Write to the file what is kept."""
        os.ftruncate(self._descriptor, self._size)
        for number, page in sorted(self._pages.items()):
            begin = number * _PAGE_BYTES
            rest = memoryview(page)[: max(0, self._size - begin)]
            while rest:
                done = os.pwrite(self._descriptor, rest, begin)
                rest, begin = rest[done:], begin + done

    def _cut(self, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut the next bytes at ends of pages into (bytes before, page, place in the page, length)."""
        done = 0
        while done < count:
            number, place = divmod(self._position + done, _PAGE_BYTES)
            length = min(count - done, _PAGE_BYTES - place)
            yield done, number, place, length
            done += length

    def _load(self, number: int) -> bytearray:
        content = bytearray(os.pread(self._descriptor, _PAGE_BYTES, number * _PAGE_BYTES))
        return content + bytes(_PAGE_BYTES - len(content))


def format_of(path: Path) -> str | None:
    """Return what an HDF5 file says it is, in its attribute `format`; None for any other file."""
    try:
        with open_regular(path) as stream:
            if stream.read(len(SIGNATURE)) != SIGNATURE:
                return None
        with h5py.File(path, "r", locking=False) as file:
            root = h5py.h5g.open(file.id, b"/")
            return bytes(_read_attribute(root, "format", "S", "a text")).decode()
    except DAMAGE:
        return None


def _read_attribute(owner: h5py.h5g.GroupID | h5py.h5d.DatasetID, name: str, kinds: str, noun: str) -> Any:
    """Read a scalar attribute whose NumPy kind is one of `kinds`; ValueError for any other."""
    if not h5py.h5a.exists(owner, name.encode()):
        raise KeyError(f"it has no attribute {name}")
    attribute = h5py.h5a.open(owner, name.encode())
    dtype, scalar = attribute.dtype, attribute.get_space().get_simple_extent_type() == h5py.h5s.SCALAR
    if not scalar or dtype.kind not in kinds or dtype.itemsize > MOST_ATTRIBUTE_BYTES:
        raise ValueError(f"the attribute {name} is not {noun}")
    value = np.empty((), dtype)
    attribute.read(value)
    return value[()]


def _decode(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
