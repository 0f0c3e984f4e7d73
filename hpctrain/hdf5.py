"""Safe reading of HDF5 files from untrusted sources, and safe writing if the disk is full.

Files of hpctrain contain groups, hard links, and datasets whose bytes are one contiguous range of the file.
All other features of HDF5 are refused before they are used: soft and external links, virtual and chunked
datasets, data in other files, attributes of other types. With some of these, HDF5 crashes, reads files that
the user did not name, or allocates as much memory as the file asks for.
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
"""Exceptions that h5py and code that reads a file's contents raise for a damaged or malicious file."""

SIGNATURE = b"\x89HDF\r\n\x1a\n"
"""First bytes of every HDF5 file that hpctrain writes."""

_PAGE_BYTES = 1 << 12
"""Size of a page in memory. It is small, since a file's headers are small and lie far apart between data."""

MAX_ATTRIBUTE_BYTES = 1 << 16
"""Largest size of an attribute in bytes; HDF5 cannot store larger ones in an object's header."""


@dataclass(frozen=True)
class LocalDataset:
    """A dataset whose bytes are one contiguous range of its file.

    Attributes:
        name: Full name, with a leading slash.
        dtype: dtype of the elements.
        shape: Shape; () for a scalar.
        offset: Offset of the first element in the file, in bytes; 0 without elements.
        identifier: Handle of the open dataset.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    identifier: h5py.h5d.DatasetID

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    def read(self, max_bytes: int) -> NDArray[Any]:
        """Return all elements, which must be numbers or text of fixed length, in a new array.

        The file must still be open.

        Args:
            max_bytes: Largest size of the elements in bytes.

        Raises:
            ValueError: The elements have another dtype, or are larger.
        """
        if self.dtype.kind not in "iufS" or self.elements * self.dtype.itemsize > max_bytes:
            raise ValueError(f"{self.name} has type {self.dtype} and shape {list(self.shape)}")
        values = np.empty(self.shape, self.dtype)
        if self.elements:
            self.identifier.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
        return values


class CheckedFile:
    """An open HDF5 file from which only `LocalDataset`s and simple attributes can be read.

    All methods raise one of `DAMAGE` if the file is damaged or contains something else. All are local calls.

    Attributes:
        datasets: Names of all datasets, each with a leading slash.
    """

    def __init__(self, file: h5py.File, size: int) -> None:
        """List the datasets of an open file.

        Args:
            file: The open file.
            size: Its size in bytes.

        Raises:
            ValueError: The file contains a soft or external link.
        """
        self._file, self._size = file, size
        names: list[str] = []

        def describe_other_link(name: bytes, info: Any) -> str | None:
            if info.type == h5py.h5l.TYPE_HARD:
                return None
            return (
                f"/{_decode(name)} is {'a soft' if info.type == h5py.h5l.TYPE_SOFT else 'an external'} link"
            )

        def collect(name: bytes, info: Any) -> None:
            if info.type == h5py.h5o.TYPE_DATASET:
                names.append(f"/{_decode(name)}")

        # In any other order HDF5 sorts the members of a group, and crashes if it cannot read them.
        other_link = file.id.links.visit(
            describe_other_link, idx_type=h5py.h5.INDEX_NAME, order=h5py.h5.ITER_NATIVE, info=True
        )
        if other_link is not None:
            raise ValueError(other_link)
        h5py.h5o.visit(file.id, collect, order=h5py.h5.ITER_NATIVE, info=True)
        self.datasets: frozenset[str] = frozenset(names)

    def dataset(self, name: str) -> LocalDataset:
        """Return a dataset by its full name.

        Raises:
            KeyError: The file has no such dataset.
            ValueError: Its bytes are not one contiguous range of this file.
        """
        if name not in self.datasets:
            raise KeyError(f"it has no dataset {name}")
        identifier = h5py.h5d.open(self._file.id, name.encode())
        if not _is_local(identifier):
            raise ValueError(f"{name} is not one contiguous range of the file")
        if identifier.get_space().get_simple_extent_type() == h5py.h5s.NULL:
            raise ValueError(f"{name} is empty")
        shape, dtype, offset = identifier.shape, identifier.dtype, identifier.get_offset()
        if not prod(shape):
            return LocalDataset(name, dtype, shape, 0, identifier)
        if offset is None or offset + prod(shape) * dtype.itemsize > self._size:
            raise ValueError(f"{name} reaches beyond the end of the file, which is truncated")
        return LocalDataset(name, dtype, shape, int(offset), identifier)

    def has_attribute(self, name: str, dataset: LocalDataset | None = None) -> bool:
        """Return True if a dataset, or the file if `dataset` is None, has an attribute, of whatever type."""
        return bool(h5py.h5a.exists(self._owner(dataset), name.encode()))

    def integer(self, name: str, dataset: LocalDataset | None = None) -> int:
        """Return an integer attribute of a dataset, or of the file if `dataset` is None.

        Raises:
            KeyError: There is no such attribute.
            ValueError: It is not one integer.
        """
        return int(_read_attribute(self._owner(dataset), name, "iu", "an integer"))

    def text(self, name: str, dataset: LocalDataset | None = None) -> str:
        """Return a text attribute (of fixed length, UTF-8) of a dataset, or of the file if `dataset` is None.

        Raises:
            KeyError: There is no such attribute.
            ValueError: It is not one text of fixed length, or is not UTF-8.
        """
        return bytes(_read_attribute(self._owner(dataset), name, "S", "a text")).decode()

    def _owner(self, dataset: LocalDataset | None) -> h5py.h5g.GroupID | h5py.h5d.DatasetID:
        return h5py.h5g.open(self._file.id, b"/") if dataset is None else dataset.identifier


def _is_local(identifier: h5py.h5d.DatasetID) -> bool:
    """Return True if a dataset is one contiguous range of its own file.

    Its property list lives no longer than this call. HDF5 crashes at the end of the process if that of a
    virtual dataset is still open then, as it would be if a traceback kept it.
    """
    creation = identifier.get_create_plist()
    return creation.get_layout() == h5py.h5d.CONTIGUOUS and not creation.get_external_count()


@contextmanager
def open_checked(path: Path) -> Iterator[CheckedFile]:
    """Open an HDF5 file for reading, and yield a CheckedFile that is closed at the end of the block.

    Raises one of `DAMAGE` if it cannot be read, is damaged or has unsupported contents.

    The file is not locked, since some file systems do not support locks. It is not needed either: a file gets
    its final name only when it is complete, and does not change after that.
    """
    with open_regular(path) as stream:
        size = stream.seek(0, 2)
    with h5py.File(path, "r", locking=False) as file:
        yield CheckedFile(file, size)


@contextmanager
def open_for_writing(path: Path, mode: Literal["w", "r+"], **options: Any) -> Iterator[h5py.File]:
    """Open an HDF5 file for writing by one process. Use it for headers and small datasets only.

    If a write of HDF5 itself fails, HDF5 crashes, at once or when the process ends. Therefore HDF5 writes
    into memory here, and the pages are written to the file at the end of the block. If the block raises an
    error, they are not written: an existing file stays as it was, and a new one is empty.

    Args:
        path: The file.
        mode: "w" creates the file, or replaces its contents; "r+" changes an existing one.
        options: Further arguments of `h5py.File`.

    Raises:
        OSError: The file cannot be written. The error names it.
    """
    flags = os.O_RDWR | (os.O_CREAT if mode == "w" else 0)
    with naming(path), descriptor_of(path, flags) as descriptor:
        pages = _PagesInMemory(descriptor, replaces=mode == "w")
        with h5py.File(pages, mode, **options) as file:
            yield file
        pages.write_back()


class _PagesInMemory:
    """File object for h5py that keeps written pages in memory until `write_back` is called.

    Args:
        descriptor: Descriptor of a file that is open for reading and writing.
        replaces: True if the file counts as empty, and `write_back` removes what it contains.
    """

    def __init__(self, descriptor: int, replaces: bool) -> None:
        self._descriptor, self._position = descriptor, 0
        self._stored_bytes = self._size = 0 if replaces else os.fstat(descriptor).st_size
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
        """Do nothing; `write_back` writes the pages."""

    def write_back(self) -> None:
        """Write the pages to the file."""
        os.ftruncate(self._descriptor, min(self._stored_bytes, self._size))
        os.ftruncate(self._descriptor, self._size)
        for number, page in sorted(self._pages.items()):
            begin = number * _PAGE_BYTES
            rest = memoryview(page)[: max(0, self._size - begin)]
            while rest:
                done = os.pwrite(self._descriptor, rest, begin)
                rest, begin = rest[done:], begin + done

    def _cut(self, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Split the next `count` bytes at page boundaries.

        Yields:
            For each part: the number of bytes before it, its page, its offset in the page, and its length.
        """
        done = 0
        while done < count:
            number, place = divmod(self._position + done, _PAGE_BYTES)
            length = min(count - done, _PAGE_BYTES - place)
            yield done, number, place, length
            done += length

    def _load(self, number: int) -> bytearray:
        begin = number * _PAGE_BYTES
        count = max(0, min(_PAGE_BYTES, self._stored_bytes - begin))
        content = bytearray(os.pread(self._descriptor, count, begin))
        return content + bytes(_PAGE_BYTES - len(content))


def format_of(path: Path) -> str | None:
    """Return the attribute `format` of an HDF5 file, such as that of a checkpoint. Nothing is raised.

    Returns:
        The text; None if the file cannot be read, is not HDF5, or has no such text.
    """
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
    """Return a scalar attribute.

    Args:
        owner: The group or dataset that has the attribute.
        name: Name of the attribute.
        kinds: NumPy kinds that its dtype may have.
        noun: Noun with article for these kinds, for messages.

    Raises:
        KeyError: There is no such attribute.
        ValueError: It has another dtype, or is not a scalar.
    """
    if not h5py.h5a.exists(owner, name.encode()):
        raise KeyError(f"it has no attribute {name}")
    attribute = h5py.h5a.open(owner, name.encode())
    dtype, scalar = attribute.dtype, attribute.get_space().get_simple_extent_type() == h5py.h5s.SCALAR
    if not scalar or dtype.kind not in kinds or dtype.itemsize > MAX_ATTRIBUTE_BYTES:
        raise ValueError(f"the attribute {name} is not {noun}")
    value = np.empty((), dtype)
    attribute.read(value)
    return value[()]


def _decode(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
