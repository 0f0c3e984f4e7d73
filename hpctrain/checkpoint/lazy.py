"""Checkpoint for scripts and notebooks: a mapping of tensors whose elements are read on demand."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.checkpoint_index import StoredTensor, examine
from hpctrain.checkpoint.names import checkpoints
from hpctrain.checkpoint.provenance import HistorySegment, history
from hpctrain.checkpoint.retention import is_complete
from hpctrain.checkpoint.stored_deck import stored_deck, stored_deck_text
from hpctrain.checkpoint.tensor_ranges import Index, TensorBox, row_major
from hpctrain.checkpoint.tensor_source import TensorSource
from hpctrain.checkpoint.verify_checksums import require_checksums
from hpctrain.deck.code import CodeTrust
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import path_of
from hpctrain.host.memory import obtainable_bytes
from hpctrain.sharding.state import MODEL
from hpctrain.text import counted, kind_of, nearest
from hpctrain.units import format_bytes

IndexPart = int | slice | EllipsisType
"""Part of an index of a tensor."""

_MODEL = f"{MODEL}/"
_SMALL_BYTES = 64 << 20
"""Size in bytes up to which free memory is not checked."""


class NoSuchNameError(HpctrainError, KeyError):
    """Name of a tensor that a checkpoint does not have. It is a KeyError, too, as for other mappings."""

    def __str__(self) -> str:
        """Return the message, which a KeyError would quote."""
        return "\n".join(self.problems)


class NoSuchElementError(HpctrainError, IndexError):
    """Index that a tensor does not have. It is an IndexError, too, as for other sequences."""


def open_checkpoint(path: str | os.PathLike[str], *, trust_code: bool = False) -> Checkpoint:
    """Open a checkpoint of any layout, or the newest complete one in a run's folder.

    This reads no tensors and runs no code from the file.

    Args:
        path: The checkpoint, or the folder of a run.
        trust_code: True if code that its deck names (modules, datasets, losses, rewards) may run when the
            deck is passed to `hpctrain.run` or `hpctrain.check`.

    Raises:
        HpctrainError: The file is not a checkpoint.
        InputOutputError: The file is missing, incomplete or damaged.
    """
    named = path_of(path, "path", "a checkpoint or a run's folder")
    return Checkpoint(newest_complete(named) if named.is_dir() else named, trust_code)


def newest_complete(run: Path) -> Path:
    """Return the newest checkpoint in a run's folder whose index is valid.

    Raises:
        InputOutputError: There is none.
    """
    for path in checkpoints(run / "checkpoints"):
        if is_complete(path):
            return path
    raise InputOutputError(f"{run}: contains no complete checkpoint (expected in {run / 'checkpoints'})")


class Checkpoint(Mapping[str, "LazyTensor"]):
    """Tensors of a checkpoint by name, such as "model/<name>" and "optimizer/<state>/<name>".

        with hpctrain.open_checkpoint("runs/quickstart") as checkpoint:
            checkpoint.step, checkpoint.deck.model.hidden, [run.ranks for run in checkpoint.history]
            checkpoint["optimizer/exp_avg/blocks.0.attention.query.weight"].shape
            checkpoint.model["blocks.0.attention.query.weight"][:4]  # four rows are read

    The file is open until `close`, so that it can be read even if a run deletes it.

    Attributes:
        path: The file.
        state: Training state: what a checkpoint has in addition to tensors.

    Raises:
        HpctrainError: The file is not a checkpoint.
        InputOutputError: The file is missing, incomplete or damaged.
    """

    def __init__(self, path: Path, trust_code: bool = False) -> None:
        self._trust = CodeTrust(everything=trust_code)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise InputOutputError(f"{path}: no such checkpoint or run folder") from None
        except (OSError, ValueError) as error:
            raise InputOutputError(f"{path}: cannot be read: {error}") from None
        self._closing = weakref.finalize(self, os.close, descriptor)
        try:
            structure = examine(path)
            same = os.path.samestat(os.fstat(descriptor), path.stat())
        except BaseException:
            self.close()
            raise
        if not same:
            self.close()
            raise InputOutputError(f"{path}: was replaced while it was opened; open it again")
        self.path = path
        self.state: Mapping[str, Any] = structure.state
        # Complete tensors are read one after another, so that no thread of the pool is ever started.
        source = TensorSource(path, descriptor, ThreadPoolExecutor(1))
        self._tensors = {
            name.removeprefix("/"): LazyTensor(name.removeprefix("/"), stored, structure.sums, source, self)
            for name, stored in structure.datasets.items()
        }

    @property
    def step(self) -> int:
        """Number of steps that were done when the file was written."""
        return int(self.state.get("step", 0))

    @cached_property
    def deck(self) -> Deck:
        """Deck of the run.

        Raises:
            HpctrainError: The file has no deck, or one that is not valid in this version.
        """
        return stored_deck(self.state, self.path, trust=self._trust)

    @property
    def deck_text(self) -> str:
        """Text of the deck in TOML."""
        return stored_deck_text(self.state, self.path)

    @cached_property
    def history(self) -> list[HistorySegment]:
        """Runs that led to the checkpoint, oldest first, with their ranks, layouts, steps and versions."""
        return history(self.state)

    @cached_property
    def model(self) -> Mapping[str, LazyTensor]:
        """Parameters of the model by name, without the prefix "model/"."""
        return _Parameters(self)

    def __getitem__(self, name: str) -> LazyTensor:
        """Return a tensor.

        Raises:
            NoSuchNameError: There is none of this name.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise NoSuchNameError(f"{self.path}: has no tensor {name!r}{_near_names(name, self._tensors)}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        size = sum(tensor.nbytes for tensor in self._tensors.values())
        return f"<{self.path}: step {self.step}, {counted(len(self), 'tensor')}, {format_bytes(size)}>"

    def close(self) -> None:
        """Close the file, so that nothing can be read any more. A second call has no effect."""
        self._closing()

    @property
    def closed(self) -> bool:
        """True if the file is closed."""
        return not self._closing.alive

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Parameters(Mapping[str, "LazyTensor"]):
    """Parameters of a checkpoint's model by name, without the prefix "model/"."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> LazyTensor:
        return self._checkpoint[f"{_MODEL}{name}"]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(_MODEL) for name in self._checkpoint if name.startswith(_MODEL))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, repr=False)
class LazyTensor:
    """Global tensor in a checkpoint, which is read on demand.

    `tensor[2, 10:20, ::2]` returns a new torch tensor and reads little more than its elements. An index has
    integers, slices with steps of at least 1, and `...`. `torch()` and `numpy()` read the complete tensor and
    compare its checksums.

    Attributes:
        name: Name in the checkpoint, such as "model/<name>".
    """

    name: str
    _stored: StoredTensor
    _sums: NDArray[np.uint64]
    _source: TensorSource
    _checkpoint: Checkpoint

    @property
    def shape(self) -> Index:
        """Global shape. A scalar has one element."""
        return self._stored.shape

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensor."""
        dtype = getattr(torch, self._stored.kind)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Size of its elements in bytes."""
        return self._stored.elements * self._stored.item_bytes

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.name}: {self._stored.kind} {list(self.shape)}>"

    def torch(self) -> Tensor:
        """Return the complete tensor.

        Raises:
            InputOutputError: The tensor is damaged.
            HpctrainError: It does not fit into memory.
        """
        tensor, words = self._allocate(self.shape)
        stored = self._stored
        if stored.elements:
            self._source.read(words, stored.offset)
            sums = checksum.seeds(stored.dataset, stored.kind, stored.shape)
            checksum.add(sums, words, (0,), (stored.elements,), (stored.elements,))
            require_checksums(self._source.path, stored, sums, self._sums[stored.pieces])
        return tensor

    def numpy(self) -> NDArray[Any]:
        """Return the complete tensor as a NumPy array, in float32 if it is in bfloat16, which NumPy lacks."""
        tensor = self.torch()
        array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __getitem__(self, place: IndexPart | tuple[IndexPart, ...]) -> Tensor:
        """Return elements of the tensor.

        Raises:
            NoSuchElementError: The tensor has no such elements.
        """
        ranges = self._ranges(place if isinstance(place, tuple) else (place,))
        start = tuple(each.start for each, _ in ranges)
        # Elements between those of a slice with a step are read, too.
        shape = tuple(each[-1] + 1 - each.start if len(each) else 0 for each, _ in ranges)
        tensor, words = self._allocate(shape)
        if prod(shape):
            self._source.read_box(words, TensorBox(start, shape, 0, row_major(shape)), self._stored)
        selected = tensor[tuple(slice(None, None, each.step) for each, _ in ranges)]
        result = selected.reshape([len(each) for each, is_dim in ranges if is_dim])
        is_part = result.numel() < tensor.numel()
        return result.clone(memory_format=torch.contiguous_format) if is_part else result

    def _ranges(self, places: tuple[IndexPart, ...]) -> list[tuple[range, bool]]:
        """Return the range of each dim, and True if the result has the dim."""
        if Ellipsis in places:
            at = places.index(Ellipsis)
            filling = (slice(None),) * (len(self.shape) - len(places) + 1)
            places = (*places[:at], *filling, *places[at + 1 :])
        if len(places) > len(self.shape):
            raise NoSuchElementError(
                f"{self.name}: has {counted(len(self.shape), 'dim')}, but got an index of {len(places)}"
            )
        places += (slice(None),) * (len(self.shape) - len(places))
        ranges = []
        for dim, (place, size) in enumerate(zip(places, self.shape, strict=True)):
            if isinstance(place, slice):
                each = range(size)[place]
                if each.step < 1:
                    raise HpctrainError(
                        f"{self.name}: a slice with step {each.step} is unsupported; use a step of at least 1"
                    )
                ranges.append((each, True))
                continue
            if isinstance(place, bool) or not hasattr(place, "__index__"):
                raise HpctrainError(
                    f"{self.name}: expected whole numbers, slices or `...` as index, but got "
                    f"{kind_of(place)}; read a slice and index the result"
                )
            number = operator.index(place)  # type: ignore[arg-type]
            if not -size <= number < size:
                raise NoSuchElementError(
                    f"{self.name}: index {number} is out of range [-{size}, {size}) along dim {dim}"
                )
            ranges.append((range(number % size, number % size + 1), False))
        return ranges

    def _allocate(self, shape: Index) -> tuple[Tensor, NDArray[np.unsignedinteger]]:
        """Return an uninitialized tensor, and its bits as a flat array.

        Raises:
            HpctrainError: The file is closed, or there is not enough memory.
        """
        if self._checkpoint.closed:
            raise HpctrainError(f"{self._source.path}: is closed, so {self.name} cannot be read")
        size = prod(shape) * self._stored.item_bytes
        free = obtainable_bytes(os.environ) if size > _SMALL_BYTES else None
        if free is not None and size > free:
            raise HpctrainError(
                f"{self.name}: requires {format_bytes(size)}, but {format_bytes(free)} of memory are free; "
                "read a slice of it"
            )
        tensor = torch.empty(shape, dtype=self.dtype)
        if not size:
            return tensor, np.empty(0, np.uint8)
        words: NDArray[np.unsignedinteger] = (
            tensor.view(-1).view(torch.uint8).numpy().view(f"u{self._stored.item_bytes}")
        )
        return tensor, words


def _near_names(name: object, names: Mapping[str, LazyTensor]) -> str:
    """Return the end of a message with similar names of tensors."""
    if not isinstance(name, str):
        return " (names must be strings)"
    same = [each for each in names if each.endswith(f"/{name.strip('/')}") or each == name.strip("/")]
    near = same[0] if same else nearest(name, list(names))
    if near is None:
        return f" (it has {counted(len(names), 'tensor')}, such as {next(iter(names), 'none')!r})"
    return f" (did you mean {near!r}?)"
