"""Fingerprints of tensors: a few numbers by which the same tensor is known on any layout.

An element counts by its index in the global tensor, so that it does not matter how that is cut, and sums over
ranks are the fingerprint of the whole. Bits are known by a wrapping sum, each word times an odd number of its
index. Values are known by a sketch (Charikar, Chen and Farach-Colton 2002): each is added, with a sign of its
index, to one of a few sums. A sketch is linear. So that of the difference of two tensors is the difference of
theirs, its length about that of what it is of (to a tenth), and of one element alone exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.memory.scratch import Flat, read_pieces
from hpctrain.parallel.shard import Shard
from hpctrain.splitmix import GOLDEN, mix

SUMS = 64
"""Of a sketch."""

_PIECE = 1 << 16
"""Elements at a time: what is computed of them stays in a cache."""

_KEY = np.uint64(0x5851F42D4C957F2D)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Indices = NDArray[np.uint64]
Sums = NDArray[np.float64]


@dataclass
class Fingerprint:
    """Of some elements: `bits`, modulo 2^64, the `sketch` of those that are finite, in fp64, how many are
    `broken`, which means not finite, and how many there are in all.
    """

    bits: int = 0
    sketch: Sums = field(default_factory=lambda: np.zeros(SUMS))
    broken: float = 0.0
    elements: float = 0.0

    def add(self, values: Tensor, indices: Indices, weight: float = 1.0) -> None:
        """Add elements with these global indices, flat; in sketch and counts by `weight`."""
        words, numbers = _read(values)
        hashed = mix(indices * np.uint64(GOLDEN) + _KEY)
        self.bits = (self.bits + int((words * (hashed | np.uint64(1))).sum(dtype=np.uint64))) % 2**64
        finite = np.isfinite(numbers)
        if not finite.all():
            self.broken += weight * float(np.count_nonzero(~finite))
            numbers = np.where(finite, numbers, 0.0)
        numbers = np.where(hashed & np.uint64(2), numbers, -numbers)
        places = (hashed >> np.uint64(58)).astype(np.int64)
        self.sketch += weight * np.bincount(places, numbers, SUMS)
        self.elements += weight * numbers.size

    def add_piece(self, shard: Shard, values: Flat, offset: int, weight: float = 1.0) -> None:
        """Add elements of a Shard's local piece, from number `offset` of it on, without their padding."""
        for first, read in read_pieces(values):
            for start, piece in _pieces(read.detach().reshape(-1)):
                indices, there = global_indices(shard, offset + first + start, piece.numel())
                self.add(piece if there is None else piece.cpu()[torch.from_numpy(there)], indices, weight)

    def add_number(self, number: float) -> None:
        """Add one number."""
        self.add(torch.tensor([number], dtype=torch.float64), np.zeros(1, np.uint64))


def length(sketch: Sums) -> float:
    """About the square root of the sum of squares of what a sketch is of."""
    with np.errstate(over="ignore"):
        found = float(np.sqrt(np.square(sketch).sum()))
    return found if np.isfinite(found) else inf


def global_indices(shard: Shard, first: int, count: int) -> tuple[Indices, NDArray[np.bool_] | None]:
    """Those of `count` elements of a Shard's local piece from number `first` on, row-major, but of padding,
    and which of the elements these are (None: all).
    """
    local, start, shape = shard.local, shard.start, shard.shape
    numbers = np.arange(first, first + count, dtype=np.uint64)
    if local[1:] == shape[1:]:
        begin = np.uint64(start[0] * prod(shape[1:])) if start else np.uint64(0)
        indices, elements = numbers + begin, prod(shape)
        if not count or int(indices[-1]) < elements:
            return indices, None
        there = indices < np.uint64(elements)
        return indices[there], there
    indices, there = np.zeros_like(numbers), np.ones(count, np.bool_)
    stride = 1
    for size, begun, whole in zip(local[::-1], start[::-1], shape[::-1], strict=True):
        numbers, places = np.divmod(numbers, np.uint64(size))
        places += np.uint64(begun)
        there &= places < np.uint64(whole)
        indices += places * np.uint64(stride)
        stride *= whole
    return (indices, None) if there.all() else (indices[there], there)


def _pieces(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, values.numel(), _PIECE):
        yield start, values[start : start + _PIECE]


def _read(values: Tensor) -> tuple[NDArray[np.uint64], Sums]:
    """The words of elements, and their values."""
    values = values.detach().cpu().contiguous()
    words = values.view(_WORDS[values.element_size()]).numpy()
    unsigned = words.view(f"u{words.itemsize}").astype(np.uint64)
    return unsigned, values.double().numpy()
