"""What a checkpoint file says it holds, read and distrusted before anything else is done with it.

One rank reads this with HDF5; all others learn from it where each dataset's bytes lie, and read those
as plain bytes of the file. Datasets are contiguous, in the file itself, and described in full here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import h5py
import numpy as np
import torch

from hpctrain.checkpoint.agree import together
from hpctrain.checkpoint.checksum import PIECE, Sums, pieces
from hpctrain.checkpoint.layout import STORED_AS, Index, row_major
from hpctrain.comm.group import Group
from hpctrain.comm.outcome import reason
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import open_regular

FORMAT = "hpctrain checkpoint"
VERSION = 1
STATE, DECK, CHECKSUMS = "/state", "/deck", "/checksums"
COMPANIONS = "companions"
"""Key of the state whose keys name models that were trained beside the file's own."""
DTYPE = b"dtype"
NAMED = {np.dtype(stored): kind for kind, stored in STORED_AS.items() if kind not in ("bfloat16", "bool")}
"""Types of datasets that tell the elements' type; the others have the attribute DTYPE."""

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_TEXT_LIMIT = 64 << 20
# What h5py raises on a file whose own structure is damaged, or is not what we wrote.
_DAMAGE = (
    OSError,
    RuntimeError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)


@dataclass(frozen=True)
class StoredTensor:
    """One dataset: its global shape, and the place of its bytes and of its checksums."""

    dataset: str
    kind: str
    shape: Index
    offset: int
    first_piece: int

    @property
    def row(self) -> tuple[str, str, Index, int, int]:
        """What makes it, to be sent to others."""
        return self.dataset, self.kind, self.shape, self.offset, self.first_piece

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return np.dtype(STORED_AS[self.kind]).itemsize

    @property
    def pieces(self) -> slice:
        """This tensor's checksums among all."""
        return slice(self.first_piece, self.first_piece + pieces(self.elements))

    def span(self, start: Index, shape: Index) -> tuple[int, int]:
        """Offset and length of the smallest range of the file that holds a rectangle, in bytes."""
        strides = row_major(self.shape)
        first = sum(at * step for at, step in zip(start, strides, strict=True))
        count = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        return self.offset + first * self.item_bytes, count * self.item_bytes


@dataclass(frozen=True)
class Structure:
    """The datasets of a file, by name, the checksums stored for them, and the training state."""

    path: Path
    datasets: dict[str, StoredTensor]
    sums: Sums
    state: dict[str, Any]

    def companion(self, dataset: str) -> str:
        """The name of the model beside the file's own that a dataset belongs to; "" of its own."""
        others, tensor = self.state.get(COMPANIONS), dataset.rsplit("/", 1)[-1]
        names = others if isinstance(others, dict) else ()
        return next((name for name in names if tensor.startswith(f"{name}.")), "")


def examine(path: Path, group: Group | None = None) -> Structure:
    """Read the structure of a checkpoint; with a group, collectively: rank 0 reads it for all.

    Errors, the same on all ranks: HpctrainError for a file that is not a checkpoint or is of a newer
    version, InputOutputError for one that is missing, unreadable, unfinished or damaged.
    """
    if group is None or group.size == 1:
        return _examine(path)
    contents = Structure(path, {}, np.empty(0, np.uint64), {})
    with together(group):
        if group.rank == 0:
            contents = _examine(path)
    rows, state, count = group.broadcast_object(
        [[stored.row for stored in contents.datasets.values()], contents.state, len(contents.sums)]
    )
    sums = group.empty((count,), torch.int64)
    if group.rank == 0:
        sums.copy_(torch.from_numpy(contents.sums.view(np.int64)))
    group.broadcast(sums)
    datasets = {row[0]: StoredTensor(*row) for row in rows}
    return Structure(path, datasets, sums.cpu().numpy().copy().view(np.uint64), state)


def _examine(path: Path) -> Structure:
    try:
        if path.is_dir():
            raise HpctrainError(f"{path}: a folder, not a checkpoint file")
        size = path.stat().st_size
        with open_regular(path) as stream:
            signature = stream.read(len(_SIGNATURE))
    except FileNotFoundError:
        raise InputOutputError(f"{path}: no such checkpoint") from None
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if size < len(_SIGNATURE):
        raise InputOutputError(f"{path}: truncated, it has only {size} bytes")
    if signature != _SIGNATURE:
        raise HpctrainError(f"{path}: not an HDF5 file, so not a checkpoint of hpctrain")
    with _damage_reported(path), h5py.File(path, "r", locking=False) as file:
        _check_kind(path, file.attrs)
        state = json.loads(_text(file, STATE, size))
        _require(isinstance(state, dict), f"{STATE} is not an object")
        if "deck" not in state and DECK in file:
            state["deck"] = _text(file, DECK, size)
        state["versions"] = json.loads(bytes(file.attrs["versions"]))
        datasets = _datasets(file, size)
        sums = _sums(file, sum(pieces(stored.elements) for stored in datasets.values()))
    return Structure(path, datasets, sums, state)


def _check_kind(path: Path, attributes: Any) -> None:
    if "format" not in attributes or bytes(attributes["format"]).decode() != FORMAT:
        raise HpctrainError(f"{path}: an HDF5 file, but not a checkpoint of hpctrain")
    version = int(attributes["version"])
    if version > VERSION:
        raise HpctrainError(
            f"{path}: checkpoint format {version}, newer than the newest this hpctrain reads, {VERSION}"
        )
    _require(int(attributes["piece"]) == PIECE, "its checksums are of pieces of another size")
    if int(attributes["complete"]) != 1:
        raise InputOutputError(f"{path}: its writing was never completed")


def _datasets(file: h5py.File, size: int) -> dict[str, StoredTensor]:
    """All tensors, by name. HDF5 itself is asked, since h5py's objects take most of the time otherwise."""
    names: list[str] = []

    def visit(name: bytes, info: Any) -> None:
        if info.type == h5py.h5o.TYPE_DATASET:
            names.append(f"/{name.decode()}")

    # In any other order HDF5 sorts what a folder holds; where it cannot read that, it crashes.
    h5py.h5o.visit(file.id, visit, order=h5py.h5.ITER_NATIVE, info=True)
    datasets: dict[str, StoredTensor] = {}
    first_piece = 0
    for name in sorted(set(names) - {STATE, DECK, CHECKSUMS}):
        dataset = h5py.h5d.open(file.id, name.encode())
        shape = dataset.shape
        offset = _offset(name, dataset, shape, size)
        datasets[name] = StoredTensor(name, _kind(name, dataset), shape, offset, first_piece)
        first_piece += pieces(prod(shape))
    return datasets


def _kind(name: str, dataset: h5py.h5d.DatasetID) -> str:
    """The name of the element type: HDF5's own tells it, or the attribute of those it has no type for."""
    dtype = dataset.dtype
    marked = h5py.h5a.exists(dataset, DTYPE)
    kind = bytes(_attribute(dataset, DTYPE)).decode() if marked else NAMED.get(dtype)
    if kind is None or STORED_AS.get(kind) != dtype:
        raise ValueError(f"{name} has type {dtype}, marked {kind}")
    return kind


def _offset(name: str, dataset: h5py.h5d.DatasetID, shape: Index, size: int) -> int:
    """Offset of the bytes of a dataset of this shape, all of which lie inside this file.

    HDF5 tells none of a dataset that is not contiguous, or that lies in other files.
    """
    count, offset = prod(shape), dataset.get_offset()
    if offset is None or count == 0:
        creation = dataset.get_create_plist()
        _require(
            creation.get_layout() == h5py.h5d.CONTIGUOUS and creation.get_external_count() == 0,
            f"{name} is not one contiguous range of the file",
        )
        if count == 0:
            return 0
    _require(
        offset is not None and offset + count * dataset.dtype.itemsize <= size,
        f"{name} reaches beyond the end of the file, which is truncated",
    )
    return int(offset)


def _attribute(dataset: h5py.h5d.DatasetID, name: bytes) -> Any:
    """A text of fixed length."""
    attribute = h5py.h5a.open(dataset, name)
    dtype = attribute.dtype
    _require(attribute.shape == () and dtype.kind == "S", f"attribute {name.decode()} is of wrong type")
    value = np.empty((), dtype)
    attribute.read(value)
    return value[()]


def _text(file: h5py.File, name: str, size: int) -> str:
    dataset = file[name]
    _offset(name, dataset.id, dataset.shape, size)
    _require(
        dataset.shape == () and dataset.dtype.kind == "S" and dataset.dtype.itemsize <= _TEXT_LIMIT,
        f"{name} is not a text",
    )
    text = bytes(dataset[()])
    _require(crc32(text) == int(dataset.attrs["crc32"]), f"{name} differs from its checksum")
    return text.decode()


def _sums(file: h5py.File, count: int) -> Sums:
    dataset = file[CHECKSUMS]
    _require(dataset.shape == (count,) and dataset.dtype == np.dtype("<u8"), f"{CHECKSUMS} is of wrong size")
    sums: Sums = dataset[()]
    _require(crc32(sums.tobytes()) == int(dataset.attrs["crc32"]), f"{CHECKSUMS} differs from its checksum")
    return sums


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    try:
        yield
    except HpctrainError:
        raise
    except _DAMAGE as error:
        raise InputOutputError(f"{path}: damaged or truncated: {reason(error)}") from None
