"""Which elements of which global tensor a rank holds, as boxes and as runs of file elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from zlib import crc32

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from hpctrain.audit.bits import integers_of
from hpctrain.memory.scratch import Flat
from hpctrain.parallel.shards import Shard

Index = tuple[int, ...]

# Replicas divide the writing of a tensor from this size on; a smaller one is written by one of them.
SPREAD_BYTES = 1 << 20

# Type of a tensor -> type of the dataset that holds it. HDF5 has no bfloat16: its bits are kept.
STORED_AS: dict[str, DTypeLike] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("u1"),
}


@dataclass(frozen=True)
class TensorRange:
    """What one rank holds of one dataset: a flat range of its Shard's local piece.

    `dataset` is the full name in the file, such as "/model/<name>" or "/optimizer/<state>/<name>".
    `values` is 1-D and contiguous, in memory or in a file: the elements `offset` to
    `offset + values.numel()` of the piece of shape `shard.local`, row-major, padding included.
    This rank is number `copy` of the `copies` ranks that hold exactly these values, over
    whatever axes; the Shard's own `copy` is not consulted.
    Writing is spread over the copies. Pieces that are not copies must not overlap.
    Forward, backward or sums of a training step may overwrite what `changes_in_step`, the update all.
    What is read is `added` to the values, if it is not to take their place.
    """

    dataset: str
    shard: Shard
    values: Flat
    offset: int = 0
    copy: int = 0
    copies: int = 1
    changes_in_step: bool = False
    added: bool = False

    def __post_init__(self) -> None:
        assert self.dataset.startswith("/") and not self.dataset.endswith("/"), self.dataset
        if isinstance(self.values, Tensor):
            assert self.values.dim() == 1 and self.values.is_contiguous(), self.dataset
        assert 0 <= self.offset <= self.shard.elements - self.values.numel(), self.dataset
        assert 0 <= self.copy < self.copies, self.dataset
        assert self.kind in STORED_AS, (self.dataset, self.kind)

    @property
    def kind(self) -> str:
        """Name of the element type, such as "bfloat16"."""
        return str(self.values.dtype).removeprefix("torch.")

    @property
    def shape(self) -> Index:
        """Shape of the dataset; a scalar is stored as one element."""
        return self.shard.shape or (1,)

    def part(self, first: int, last: int) -> TensorRange:
        """The elements `first` to `last` of `values`, as an TensorRange of one copy."""
        return replace(self, values=self.values[first:last], offset=self.offset + first, copy=0, copies=1)

    def share(self) -> tuple[int, int]:
        """First and last element of `values` that this copy writes; the copies' shares tile it."""
        count = self.values.numel()
        if count * self.values.element_size() >= SPREAD_BYTES:
            return count * self.copy // self.copies, count * (self.copy + 1) // self.copies
        # A fixed copy per dataset, so that many small tensors still spread over the copies.
        writer = crc32(self.dataset.encode()) % self.copies
        return (0, count) if writer == self.copy else (0, 0)


@dataclass(frozen=True)
class TensorBox:
    """A box of a global tensor and where it lies in an TensorRange's values.

    Element (0, ..., 0) is the global element `start` and values[at]; in memory its dims have `strides`.
    """

    start: Index
    shape: Index
    at: int
    strides: Index

    @property
    def elements(self) -> int:
        """Elements of the box."""
        return prod(self.shape)

    def view(self, values: Tensor) -> Tensor:
        """The box as a strided view into the TensorRange's values, its bits as integers."""
        bits = integers_of(values)
        return bits.as_strided(self.shape, self.strides, bits.storage_offset() + self.at)

    def load(self, values: Flat) -> Tensor:
        """As `view`, of values that may lie in a file; then it is a copy."""
        if isinstance(values, Tensor):
            return self.view(values)
        return replace(self, at=0).view(values[self.at : self.at + self._span].load())

    @contextmanager
    def filling(self, values: Flat) -> Iterator[Tensor]:
        """As `view`, to be overwritten within; in a file, what lies between the rows becomes zero."""
        if isinstance(values, Tensor):
            yield self.view(values)
            return
        memory = torch.zeros(self._span, dtype=values.dtype)
        yield replace(self, at=0).view(memory)
        values[self.at : self.at + self._span].copy_(memory)

    @property
    def _span(self) -> int:
        """Elements from the first to the last in memory."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def cut(self, limit: int) -> Iterator[TensorBox]:
        """The box in consecutive boxes of at most `limit` elements."""
        if self.elements <= limit:
            yield self
            return
        dim = next(d for d, size in enumerate(self.shape) if size > 1)
        rows = max(1, limit // prod(self.shape[dim + 1 :]))
        for row in range(0, self.shape[dim], rows):
            yield from TensorBox(
                _with(self.start, dim, self.start[dim] + row),
                _with(self.shape, dim, min(rows, self.shape[dim] - row)),
                self.at + row * self.strides[dim],
                self.strides,
            ).cut(limit)


@dataclass(frozen=True)
class FlatRuns:
    """Equally long, equally spaced runs of a flattened global tensor.

    Run r is the flat elements `first + r * stride` to `first + r * stride + length`.
    """

    first: int
    count: int
    stride: int
    length: int


def boxes_of(entry: TensorRange) -> list[TensorBox]:
    """The boxes of the global tensor that an TensorRange's values hold, padding left out.

    They are in the order of the values. A range in n dims gives at most 2n - 1 of them.
    """
    local = entry.shard.local or (1,)
    extent = entry.shard.extent if entry.shard.local else (1,)
    origin = entry.shard.start or (0,)
    strides = row_major(local)
    held = []
    for start, shape in flat_range_boxes(local, entry.offset, entry.offset + entry.values.numel()):
        size = tuple(min(s + n, e) - s for s, n, e in zip(start, shape, extent, strict=True))
        if min(size) > 0:
            at = sum(s * step for s, step in zip(start, strides, strict=True)) - entry.offset
            first = tuple(o + s for o, s in zip(origin, start, strict=True))
            held.append(TensorBox(first, size, at, strides))
    return held


def flat_range_boxes(shape: Index, first: int, last: int) -> Iterator[tuple[Index, Index]]:
    """Start and shape of the boxes that make up the flat elements `first` to `last` of `shape`."""
    if first >= last:
        return
    if len(shape) == 1:
        yield (first,), (last - first,)
        return
    row = prod(shape[1:])
    (top, head), (bottom, tail) = divmod(first, row), divmod(last, row)
    if head:
        for start, size in flat_range_boxes(shape[1:], head, tail if top == bottom else row):
            yield (top, *start), (1, *size)
        if top == bottom:
            return
        top += 1
    if top < bottom:
        yield (top,) + (0,) * (len(shape) - 1), (bottom - top, *shape[1:])
    for start, size in flat_range_boxes(shape[1:], 0, tail):
        yield (bottom, *start), (1, *size)


def flat_runs(start: Index, shape: Index, whole: Index) -> Iterator[FlatRuns]:
    """The runs, in row-major order, that a box makes in the flattened tensor of shape `whole`."""
    strides = row_major(whole)
    inner = len(shape) - 1
    while inner > 0 and shape[inner] == whole[inner]:
        inner -= 1
    length = prod(shape[inner:])
    origin = sum(s * step for s, step in zip(start, strides, strict=True))
    if inner == 0:
        yield FlatRuns(origin, 1, length, length)
        return
    outer = inner - 1
    for index in np.ndindex(*shape[:outer]):
        first = origin + sum(i * step for i, step in zip(index, strides, strict=False))
        yield FlatRuns(first, shape[outer], strides[outer], length)


def row_major(shape: Index) -> Index:
    """Strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _with(index: Index, dim: int, value: int) -> Index:
    return (*index[:dim], value, *index[dim + 1 :])
