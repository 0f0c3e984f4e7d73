"""A checkpoint for a script or a notebook: tensors by name, of which as much is read as is asked for."""

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
from hpctrain.checkpoint.verify_checksums import damage_message
from hpctrain.deck.code import CodeTrust
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.files import path_of
from hpctrain.host.memory import obtainable_bytes
from hpctrain.sharding.state import MODEL
from hpctrain.text import counted, kind_of, nearest
from hpctrain.units import format_bytes

Place = int | slice | EllipsisType
_MODEL = f"{MODEL}/"
_SMALL_BYTES = 64 << 20  # for which nobody asks how much memory is free


class NoSuchNameError(HpctrainError, KeyError):
    """A tensor that a checkpoint does not have; a KeyError, too, as of any mapping."""

    def __str__(self) -> str:
        """The sentence, which a KeyError would put into quotes."""
        return "\n".join(self.problems)


class NoSuchElementError(HpctrainError, IndexError):
    """Elements that a tensor does not have; an IndexError, too, as of any sequence."""


def open_checkpoint(path: str | os.PathLike[str], *, trust_code: bool = False) -> Checkpoint:
    """Open a checkpoint of any layout, or the newest complete one in a run's folder.

    This reads no tensors and runs no code from the file. With `trust_code`, code that its deck names
    (modules, datasets, losses, rewards) may run when the deck is passed to `hpctrain.run` or
    `hpctrain.check`.

    HpctrainError for what is no checkpoint, InputOutputError for one that is missing, unfinished or damaged.
    """
    named = path_of(path, "path", "a checkpoint or a run's folder")
    return Checkpoint(newest_complete(named) if named.is_dir() else named, trust_code)


def newest_complete(run: Path) -> Path:
    """The newest checkpoint of a run's folder whose structure is good; InputOutputError where none is."""
    for path in checkpoints(run / "checkpoints"):
        if is_complete(path):
            return path
    raise InputOutputError(f"{run}: contains no complete checkpoint (expected in {run / 'checkpoints'})")


class Checkpoint(Mapping[str, "LazyTensor"]):
    """All that a checkpoint holds, by name: "model/<name>", "optimizer/<state>/<name>" and so on.

        with hpctrain.open_checkpoint("runs/quickstart") as checkpoint:
            checkpoint.step, checkpoint.deck.model.hidden, [run.ranks for run in checkpoint.history]
            checkpoint["optimizer/exp_avg/blocks.0.attention.query.weight"].shape
            checkpoint.model["blocks.0.attention.query.weight"][:4]  # four rows are read

    The file stays open until `close`, so that a run may delete it meanwhile.
    """

    def __init__(self, path: Path, trust_code: bool = False) -> None:
        """Open it; errors as in `open_checkpoint`."""
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
        """What a run stores besides tensors, as the checkpoint has it."""
        # Whole reads are one after the other: no thread is started for them.
        source = TensorSource(path, descriptor, ThreadPoolExecutor(1))
        self._tensors = {
            name.removeprefix("/"): LazyTensor(name.removeprefix("/"), stored, structure.sums, source, self)
            for name, stored in structure.datasets.items()
        }

    @property
    def step(self) -> int:
        """Steps that were done when it was written."""
        return int(self.state.get("step", 0))

    @cached_property
    def deck(self) -> Deck:
        """The deck of its run. HpctrainError where it has none, or this version does not understand it."""
        return stored_deck(self.state, self.path, trust=self._trust)

    @property
    def deck_text(self) -> str:
        """The deck as it is stored, in TOML."""
        return stored_deck_text(self.state, self.path)

    @cached_property
    def history(self) -> list[HistorySegment]:
        """The runs that led to it, the first one first: their ranks, layouts, steps and versions."""
        return history(self.state)

    @cached_property
    def model(self) -> Mapping[str, LazyTensor]:
        """The parameters alone, by their own names: those of "model/"."""
        return _Parameters(self)

    def __getitem__(self, name: str) -> LazyTensor:
        """A tensor; a NoSuchNameError, which is an HpctrainError, tells near names."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise NoSuchNameError(f"{self.path}: has no tensor {name!r}{_meant(name, self._tensors)}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        size = sum(tensor.nbytes for tensor in self._tensors.values())
        return f"<{self.path}: step {self.step}, {counted(len(self), 'tensor')}, {format_bytes(size)}>"

    def close(self) -> None:
        """Close the file; nothing can be read afterwards. A second call does nothing."""
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
    """A tensor in a checkpoint, whole, whatever ranks wrote it: its shape and type, and its values on demand.

    `tensor[2, 10:20, ::2]` reads about what it gives, as a torch tensor of its own: whole numbers, slices
    with steps from 1 up and `...` are understood. `torch()` and `numpy()` read all of it and compare its
    checksums.
    """

    name: str
    _stored: StoredTensor
    _sums: NDArray[np.uint64]
    _source: TensorSource
    _checkpoint: Checkpoint

    @property
    def shape(self) -> Index:
        """Shape of the whole tensor. A scalar has one element."""
        return self._stored.shape

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensor."""
        dtype = getattr(torch, self._stored.kind)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self._stored.elements * self._stored.item_bytes

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.name}: {self._stored.kind} {list(self.shape)}>"

    def torch(self) -> Tensor:
        """Return the whole tensor.

        Raises:
            InputOutputError: The tensor is damaged.
            HpctrainError: It does not fit into memory.
        """
        tensor, words = self._room(self.shape)
        stored = self._stored
        if stored.elements:
            self._source.read(words, stored.offset)
            sums = checksum.seeds(stored.dataset, stored.kind, stored.shape)
            checksum.add(sums, words, (0,), (stored.elements,), (stored.elements,))
            damaged = np.flatnonzero(sums != self._sums[stored.pieces])
            if len(damaged):
                raise InputOutputError(damage_message(self._source.path, stored, damaged.tolist()))
        return tensor

    def numpy(self) -> NDArray[Any]:
        """Return the whole tensor as a NumPy array. Values in bfloat16, which NumPy lacks, become float32."""
        tensor = self.torch()
        array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __getitem__(self, place: Place | tuple[Place, ...]) -> Tensor:
        """Some of it; NoSuchElementError, which is an HpctrainError, where there is no such element."""
        ranges = self._ranges(place if isinstance(place, tuple) else (place,))
        start = tuple(each.start for each, _ in ranges)
        # From the first element to the last; what lies between those of a step is read, too, and let go.
        shape = tuple(each[-1] + 1 - each.start if len(each) else 0 for each, _ in ranges)
        tensor, words = self._room(shape)
        if prod(shape):
            self._source.read_box(words, TensorBox(start, shape, 0, row_major(shape)), self._stored)
        kept = tensor[tuple(slice(None, None, each.step) for each, _ in ranges)]
        given = kept.reshape([len(each) for each, stays in ranges if stays])
        return given.clone(memory_format=torch.contiguous_format) if given.numel() < tensor.numel() else given

    def _ranges(self, places: tuple[Place, ...]) -> list[tuple[range, bool]]:
        """Return the range of each dim, and whether the dim is kept in the result."""
        if Ellipsis in places:
            at = places.index(Ellipsis)
            filling = (slice(None),) * (len(self.shape) - len(places) + 1)
            places = (*places[:at], *filling, *places[at + 1 :])
        if len(places) > len(self.shape):
            raise NoSuchElementError(
                f"{self.name}: has {counted(len(self.shape), 'dim')}, but got an index of {len(places)}"
            )
        places += (slice(None),) * (len(self.shape) - len(places))
        found = []
        for dim, (place, size) in enumerate(zip(places, self.shape, strict=True)):
            if isinstance(place, slice):
                each = range(size)[place]
                if each.step < 1:
                    raise HpctrainError(
                        f"{self.name}: a slice with step {each.step} is unsupported; use a step of at least 1"
                    )
                found.append((each, True))
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
            found.append((range(number % size, number % size + 1), False))
        return found

    def _room(self, shape: Index) -> tuple[Tensor, NDArray[np.unsignedinteger]]:
        """An empty tensor, and its bits, flat."""
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


def _meant(name: object, names: Mapping[str, LazyTensor]) -> str:
    """Return a sentence with the names that the user may have meant."""
    if not isinstance(name, str):
        return " (names must be strings)"
    same = [each for each in names if each.endswith(f"/{name.strip('/')}") or each == name.strip("/")]
    near = same[0] if same else nearest(name, list(names))
    if near is None:
        return f" (it has {counted(len(names), 'tensor')}, such as {next(iter(names), 'none')!r})"
    return f" (did you mean {near!r}?)"
