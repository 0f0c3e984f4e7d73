"""Index of a checkpoint file: datasets with their places, checksums and the training state, all validated.

One rank reads it with HDF5 and broadcasts it. The other ranks then read tensors as plain bytes of the file,
since datasets are contiguous and inside the file itself.
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
"""Key of the state whose keys are the prefixes of auxiliary models, such as "critic"."""
DTYPE = "dtype"
DTYPE_NAMES = {
    np.dtype(stored): kind for kind, stored in STORED_AS.items() if kind not in ("bfloat16", "bool")
}
"""dtypes of tensors by types of datasets, if the latter determine them. Others have the attribute DTYPE."""

_TEXT_LIMIT = 64 << 20


@dataclass(frozen=True)
class StoredTensor:
    """Dataset of a checkpoint: shape, and place of its bytes and of its checksums.

    Attributes:
        dataset: Name in the file, such as "/model/<name>".
        kind: Name of the dtype, such as "bfloat16".
        shape: Global shape.
        offset: Offset of its first byte in the file.
        first_piece: Number of its first checksum among those of the file.
    """

    dataset: str
    kind: str
    shape: Index
    offset: int
    first_piece: int

    @property
    def row(self) -> tuple[str, str, Index, int, int]:
        """Arguments of the constructor, to be sent to other ranks."""
        return self.dataset, self.kind, self.shape, self.offset, self.first_piece

    @property
    def elements(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Size of an element in bytes."""
        return np.dtype(STORED_AS[self.kind]).itemsize

    @property
    def pieces(self) -> slice:
        """Slice of this dataset in the checksums of the file."""
        return slice(self.first_piece, self.first_piece + pieces(self.elements))

    def span(self, start: Index, shape: Index) -> tuple[int, int]:
        """Return offset and length in bytes of the smallest range of the file that holds a box."""
        strides = row_major(self.shape)
        first = sum(at * step for at, step in zip(start, strides, strict=True))
        count = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        return self.offset + first * self.item_bytes, count * self.item_bytes


@dataclass(frozen=True)
class CheckpointIndex:
    """Index of a checkpoint file.

    Attributes:
        path: The file.
        datasets: Datasets by name, sorted.
        sums: Checksums of all datasets, in their order.
        state: Training state, with the versions of libraries.
    """

    path: Path
    datasets: dict[str, StoredTensor]
    sums: Sums
    state: dict[str, Any]

    def auxiliary_model(self, dataset: str) -> str:
        """Return the name of the auxiliary model of a dataset, such as "critic"; "" for the main model."""
        others, tensor = self.state.get(AUXILIARY_MODELS), dataset.rsplit("/", 1)[-1]
        names = others if isinstance(others, dict) else ()
        return next((name for name in names if tensor.startswith(f"{name}.")), "")


def examine(path: Path, group: Group | None = None) -> CheckpointIndex:
    """Read and validate the index of a checkpoint.

    Args:
        path: The file.
        group: Ranks that call this together. Rank 0 reads the file and broadcasts the result, and all ranks
            raise the same error. None for a local call.

    Raises:
        HpctrainError: The file is not a checkpoint, or has a newer version.
        InputOutputError: The file is missing, unreadable, incomplete or damaged.
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
    """Return all tensors of a file by name, in sorted order."""
    datasets: dict[str, StoredTensor] = {}
    first_piece = 0
    for name in sorted(file.datasets - {STATE, DECK, CHECKSUMS}):
        dataset = file.dataset(name)
        kind = _kind(file, dataset)
        datasets[name] = StoredTensor(name, kind, dataset.shape, dataset.offset, first_piece)
        first_piece += pieces(dataset.elements)
    return datasets


def _kind(file: CheckedFile, dataset: LocalDataset) -> str:
    """Return the dtype of a dataset, from its attribute if the type of the dataset does not determine it."""
    kind = file.text(DTYPE, dataset) if file.has_attribute(DTYPE, dataset) else DTYPE_NAMES.get(dataset.dtype)
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
