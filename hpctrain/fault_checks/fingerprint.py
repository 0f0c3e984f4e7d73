"""Fingerprints that identify a tensor on any layout.

A fingerprint depends on the elements and their indices in the global tensor. So the split among ranks does
not matter, and the sum of the ranks' fingerprints is that of the whole tensor. A fingerprint has two parts:

- A wrapping sum of the elements' bits, each multiplied by an odd number that depends on its index. It
  identifies the bits.
- A sketch of the values (Charikar, Chen and Farach-Colton 2002): each value is added to one of a few sums,
  with a sign that depends on its index. Sketches are linear, so the sketch of a difference is the difference
  of the sketches. Its norm is that of the tensor with an error of about 10%, and exact for a single element.

Three other sums of bits are faster, because they detect less:

| sum | used for |
|---|---|
| `word_sum` (`audit/bits.py`) | one changed bit, in messages and in memory |
| `PositionSums` (`fault_checks/replica_check.py`) | equality of the same piece on several ranks |
| `checkpoint/checksum.py` | pieces of a file, in a format that older files have |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.audit.bits import integers_of
from hpctrain.memory.scratch import Flat, read_pieces
from hpctrain.parallel.shards import Shard
from hpctrain.splitmix import GOLDEN, mix

SUMS = 64
"""Number of sums of a sketch."""

_PIECE = 1 << 16
"""Number of elements at a time, so that intermediate results remain in the cache."""

_KEY = np.uint64(0x5851F42D4C957F2D)

Indices = NDArray[np.uint64]
Sums = NDArray[np.float64]


@dataclass
class Fingerprint:
    """Fingerprint of some elements.

    Attributes:
        bits: Sum of the bits modulo 2^64.
        sketch: Sketch of the finite elements, fp64 [SUMS].
        broken: Number of elements that are not finite.
        elements: Number of all elements.
    """

    bits: int = 0
    sketch: Sums = field(default_factory=lambda: np.zeros(SUMS))
    broken: float = 0.0
    elements: float = 0.0

    def add(self, values: Tensor, indices: Indices, weight: float = 1.0) -> None:
        """Add elements with these global indices.

        Args:
            values: The elements, flat.
            indices: Their indices in the global tensor.
            weight: Factor of the sketch and of the counts.
        """
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
        """Add elements of a Shard's local tensor, from index `offset` on, without their padding."""
        for first, read in read_pieces(values):
            for start, piece in _pieces(read.detach().reshape(-1)):
                indices, is_real = global_indices(shard, offset + first + start, piece.numel())
                self.add(
                    piece if is_real is None else piece.cpu()[torch.from_numpy(is_real)], indices, weight
                )


def sketch_norm(sketch: Sums) -> float:
    """Return an estimate of the 2-norm of the values that a sketch was made from."""
    with np.errstate(over="ignore"):
        norm = float(np.sqrt(np.square(sketch).sum()))
    return norm if np.isfinite(norm) else inf


def global_indices(shard: Shard, first: int, count: int) -> tuple[Indices, NDArray[np.bool_] | None]:
    """Return the global indices of consecutive elements of a Shard's local tensor, without padding.

    Args:
        shard: The Shard.
        first: Row-major index of the first element in the local tensor.
        count: Number of elements.

    Returns:
        The indices; a mask of the elements that are not padding, or None if none is.
    """
    local, start, shape, extent = shard.local, shard.start, shard.shape, shard.extent
    numbers = np.arange(first, first + count, dtype=np.uint64)
    if local[1:] == shape[1:]:
        begin = np.uint64(start[0] * prod(shape[1:])) if start else np.uint64(0)
        indices, elements = numbers + begin, prod(extent)
        if not count or int(numbers[-1]) < elements:
            return indices, None
        is_real = numbers < np.uint64(elements)
        return indices[is_real], is_real
    indices, is_real = np.zeros_like(numbers), np.ones(count, np.bool_)
    stride = 1
    dims = zip(local[::-1], extent[::-1], start[::-1], shape[::-1], strict=True)
    for size, real_size, begin_of_dim, global_size in dims:
        numbers, places = np.divmod(numbers, np.uint64(size))
        is_real &= places < np.uint64(real_size)
        places += np.uint64(begin_of_dim)
        indices += places * np.uint64(stride)
        stride *= global_size
    return (indices, None) if is_real.all() else (indices[is_real], is_real)


def _pieces(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, values.numel(), _PIECE):
        yield start, values[start : start + _PIECE]


def _read(values: Tensor) -> tuple[NDArray[np.uint64], Sums]:
    """Return the words and the values of elements."""
    values = values.detach().cpu().contiguous()
    words = integers_of(values).numpy()
    unsigned = words.view(f"u{words.itemsize}").astype(np.uint64)
    return unsigned, values.double().numpy()
