"""What a checkpoint file says it holds, read and distrusted before anything else is done with it.

One rank reads this with HDF5; all others learn from it where each dataset's bytes lie, and read those
as plain bytes of the file. Datasets are contiguous, in the file itself, and described in full here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from hpctrain.checkpoint.agree import raise_on_all_ranks
from hpctrain.checkpoint.checksum import PIECE, Sums, pieces
from hpctrain.checkpoint.stored_state import require_state
from hpctrain.checkpoint.tensor_ranges import STORED_AS, Index, row_major
from hpctrain.comm.error_messages import error_reason
from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import open_regular, parse_json
from hpctrain.hdf5 import DAMAGE, SIGNATURE, CheckedFile, LocalDataset, open_checked

FORMAT = "hpctrain checkpoint"
VERSION = 1
STATE, DECK, CHECKSUMS = "/state", "/deck", "/checksums"
AUXILIARY_MODELS = "companions"
"""Key of the state whose keys name models that were trained beside the file's own."""
DTYPE = "dtype"
NAMED = {np.dtype(stored): kind for kind, stored in STORED_AS.items() if kind not in ("bfloat16", "bool")}
"""Types of datasets that tell the elements' type; the others have the attribute DTYPE."""

_TEXT_LIMIT = 64 << 20


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
        """Offset and length of the smallest range of the file that holds a box, in bytes."""
        strides = row_major(self.shape)
        first = sum(at * step for at, step in zip(start, strides, strict=True))
        count = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        return self.offset + first * self.item_bytes, count * self.item_bytes


@dataclass(frozen=True)
class CheckpointIndex:
    """The datasets of a file, by name, the checksums stored for them, and the training state."""

    path: Path
    datasets: dict[str, StoredTensor]
    sums: Sums
    state: dict[str, Any]

    def auxiliary_model(self, dataset: str) -> str:
        """The name of the model beside the file's own that a dataset belongs to; "" of its own."""
        others, tensor = self.state.get(AUXILIARY_MODELS), dataset.rsplit("/", 1)[-1]
        names = others if isinstance(others, dict) else ()
        return next((name for name in names if tensor.startswith(f"{name}.")), "")


def examine(path: Path, group: Group | None = None) -> CheckpointIndex:
    """Read the structure of a checkpoint; with a group, collectively: rank 0 reads it for all.

    Errors, the same on all ranks: HpctrainError for a file that is not a checkpoint or is of a newer
    version, InputOutputError for one that is missing, unreadable, unfinished or damaged.
    """
    if group is None or group.size == 1:
        return _examine(path)
    contents = CheckpointIndex(path, {}, np.empty(0, np.uint64), {})
    with raise_on_all_ranks(group):
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
    return CheckpointIndex(path, datasets, sums.cpu().numpy().copy().view(np.uint64), state)


def _examine(path: Path) -> CheckpointIndex:
    try:
        if path.is_dir():
            hint = f"; name a file of {path / 'checkpoints'}" if (path / "checkpoints").is_dir() else ""
            raise HpctrainError(f"{path}: a folder, not a checkpoint file{hint}")
        size = path.stat().st_size
        with open_regular(path) as stream:
            signature = stream.read(len(SIGNATURE))
    except FileNotFoundError:
        raise InputOutputError(f"{path}: no such checkpoint") from None
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if size < len(SIGNATURE):
        raise InputOutputError(f"{path}: truncated: it has only {size} bytes")
    if signature != SIGNATURE:
        raise HpctrainError(f"{path}: not an HDF5 file, so not a checkpoint of hpctrain")
    try:
        with open_checked(path) as file:
            _check_kind(path, file)
            state = parse_json(_text(file, STATE))
            _require(isinstance(state, dict), f"{STATE} is not an object")
            if "deck" not in state and DECK in file.datasets:
                state["deck"] = _text(file, DECK)
            state["versions"] = parse_json(file.text("versions"))
            require_state(state)
            datasets = _datasets(file)
            sums = _sums(file, sum(pieces(stored.elements) for stored in datasets.values()))
    except DAMAGE as error:
        raise InputOutputError(f"{path}: damaged or truncated: {error_reason(error)}") from None
    return CheckpointIndex(path, datasets, sums, state)


def _check_kind(path: Path, file: CheckedFile) -> None:
    if not file.has_attribute("format") or file.text("format") != FORMAT:
        raise HpctrainError(f"{path}: an HDF5 file, but not a checkpoint of hpctrain")
    version = file.integer("version")
    if version > VERSION:
        raise HpctrainError(
            f"{path}: checkpoint format {version} is unsupported; this hpctrain reads formats up to {VERSION}"
        )
    _require(version == VERSION, f"its format is {version}")
    _require(file.integer("piece") == PIECE, "its checksums are for pieces of another size")
    if file.integer("complete") != 1:
        raise InputOutputError(f"{path}: is incomplete, since writing it did not finish")


def _datasets(file: CheckedFile) -> dict[str, StoredTensor]:
    """Find all tensors, by name, in sorted order."""
    datasets: dict[str, StoredTensor] = {}
    first_piece = 0
    for name in sorted(file.datasets - {STATE, DECK, CHECKSUMS}):
        dataset = file.dataset(name)
        kind = _kind(file, dataset)
        datasets[name] = StoredTensor(name, kind, dataset.shape, dataset.offset, first_piece)
        first_piece += pieces(dataset.elements)
    return datasets


def _kind(file: CheckedFile, dataset: LocalDataset) -> str:
    """Return the element type: HDF5's own tells it, or the attribute of those it has no type for."""
    kind = file.text(DTYPE, dataset) if file.has_attribute(DTYPE, dataset) else NAMED.get(dataset.dtype)
    if kind is None or STORED_AS.get(kind) != dataset.dtype:
        raise ValueError(f"{dataset.name} has type {dataset.dtype}, but is marked as {kind}")
    return kind


def _text(file: CheckedFile, name: str) -> str:
    dataset = file.dataset(name)
    _require(dataset.shape == () and dataset.dtype.kind == "S", f"{name} is not a string")
    text = bytes(dataset.read(_TEXT_LIMIT)[()])
    _require(crc32(text) == file.integer("crc32", dataset), f"{name} differs from its checksum")
    return text.decode()


def _sums(file: CheckedFile, count: int) -> Sums:
    dataset = file.dataset(CHECKSUMS)
    right = dataset.shape == (count,) and dataset.dtype == np.dtype("<u8")
    _require(right, f"{CHECKSUMS} has a wrong size or type")
    sums: Sums = dataset.read(8 * count)
    _require(
        crc32(sums.tobytes()) == file.integer("crc32", dataset), f"{CHECKSUMS} differs from its checksum"
    )
    return sums


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
