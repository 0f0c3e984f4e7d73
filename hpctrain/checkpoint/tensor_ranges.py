"""Local elements of global tensors: flat ranges of local tensors, boxes, and runs of flat elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from hpctrain.audit.bits import integers_of
from hpctrain.memory.scratch import Flat
from hpctrain.parallel.shards import Shard

Index = tuple[int, ...]

SPREAD_BYTES = 1 << 20
"""Size in bytes from which ranks with the same range share the writing. One rank writes a smaller range."""

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
"""Type of the dataset for each dtype of tensors. HDF5 has no bfloat16, whose bits are stored as integers."""


@dataclass(frozen=True)
class TensorRange:
    """Flat range of a local tensor, which is a part of a dataset of a checkpoint.

    Several ranks may hold the same range and share the writing of it. Other ranges must not overlap.

    Attributes:
        dataset: Full name in the file, such as "/model/<name>" or "/optimizer/<state>/<name>".
        shard: Place of the local tensor in the global one. Its own `copy` is not used.
        values: Elements `offset` to `offset + values.numel()` of the local tensor, which has the shape
            `shard.local`, is row-major and includes padding. 1-D and contiguous, in memory or in a file.
        offset: First element of the range in the flattened local tensor.
        copy: Number of this rank among those that hold exactly these elements.
        copies: Number of these ranks, over all axes of the mesh.
        changes_in_step: True if a training step changes the values before the update, which may change all.
        added: True to add what is read to the values, False to replace them.
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
        """Return the elements `first` to `last` of `values` as a range that only this rank holds."""
        return replace(self, values=self.values[first:last], offset=self.offset + first, copy=0, copies=1)

    def share(self) -> tuple[int, int]:
        """Return the first element of `values` that this rank writes, and the end of its share."""
        count = self.values.numel()
        if count * self.values.element_size() >= SPREAD_BYTES:
            return count * self.copy // self.copies, count * (self.copy + 1) // self.copies
        # The writer depends on the name of the dataset, so that ranks share the work of many small tensors.
        writer = crc32(self.dataset.encode()) % self.copies
        return (0, count) if writer == self.copy else (0, 0)


@dataclass(frozen=True)
class TensorBox:
    """Box of a global tensor, and its place in the values of a TensorRange.

    Attributes:
        start: Index of its first element in the global tensor.
        shape: Its extent in each dim.
        at: Index of its first element in the values.
        strides: Distance in the values between neighbors along each dim.
    """

    start: Index
    shape: Index
    at: int
    strides: Index

    @property
    def elements(self) -> int:
        """Number of elements of the box."""
        return prod(self.shape)

    def view(self, values: Tensor) -> Tensor:
        """Return the box as a strided view of the values of its TensorRange, as bits in integers."""
        bits = integers_of(values)
        return bits.as_strided(self.shape, self.strides, bits.storage_offset() + self.at)

    def load(self, values: Flat) -> Tensor:
        """Return what `view` returns, or a copy of it if the values are in a file."""
        if isinstance(values, Tensor):
            return self.view(values)
        return replace(self, at=0).view(values[self.at : self.at + self._span].load())

    @contextmanager
    def filling(self, values: Flat) -> Iterator[Tensor]:
        """Yield what `view` returns, so that the block overwrites it.

        If the values are in a file, elements between the rows of the box become zero.
        """
        if isinstance(values, Tensor):
            yield self.view(values)
            return
        memory = torch.zeros(self._span, dtype=values.dtype)
        yield replace(self, at=0).view(memory)
        values[self.at : self.at + self._span].copy_(memory)

    @property
    def _span(self) -> int:
        """Number of elements from the first one to the last one in the values."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def cut(self, limit: int) -> Iterator[TensorBox]:
        """Yield consecutive boxes of at most `limit` elements that make up this one."""
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
    """Contiguous runs of a flattened global tensor, with equal lengths and distances.

    Run r has the elements `first + r * stride` to `first + r * stride + length`.

    Attributes:
        first: First element of the first run.
        count: Number of runs.
        stride: Distance between the beginnings of two runs, in elements.
        length: Number of elements of a run.
    """

    first: int
    count: int
    stride: int
    length: int


def boxes_of(entry: TensorRange) -> list[TensorBox]:
    """Return the boxes that make up a range without its padding, in the order of its values.

    A range of a tensor with n dims has at most 2n - 1 boxes.
    """
    local = entry.shard.local or (1,)
    extent = entry.shard.extent if entry.shard.local else (1,)
    shard_start = entry.shard.start or (0,)
    strides = row_major(local)
    boxes = []
    for start, shape in flat_range_boxes(local, entry.offset, entry.offset + entry.values.numel()):
        size = tuple(min(s + n, e) - s for s, n, e in zip(start, shape, extent, strict=True))
        if min(size) > 0:
            at = sum(s * step for s, step in zip(start, strides, strict=True)) - entry.offset
            first = tuple(o + s for o, s in zip(shard_start, start, strict=True))
            boxes.append(TensorBox(first, size, at, strides))
    return boxes


def flat_range_boxes(shape: Index, first: int, last: int) -> Iterator[tuple[Index, Index]]:
    """Yield start and shape of the boxes that make up the flat elements `first` to `last` of a tensor."""
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


def flat_runs(start: Index, shape: Index, global_shape: Index) -> Iterator[FlatRuns]:
    """Yield the runs of a box in the flattened tensor of shape `global_shape`, in row-major order."""
    strides = row_major(global_shape)
    inner = len(shape) - 1
    while inner > 0 and shape[inner] == global_shape[inner]:
        inner -= 1
    length = prod(shape[inner:])
    box_start = sum(s * step for s, step in zip(start, strides, strict=True))
    if inner == 0:
        yield FlatRuns(box_start, 1, length, length)
        return
    outer = inner - 1
    for index in np.ndindex(*shape[:outer]):
        first = box_start + sum(i * step for i, step in zip(index, strides, strict=False))
        yield FlatRuns(first, shape[outer], strides[outer], length)


def split_into_runs(
    words: NDArray[Any], start: Index, shape: Index, global_shape: Index
) -> Iterator[tuple[FlatRuns, NDArray[Any]]]:
    """Yield the runs of a box, as `flat_runs` does, each with its elements [count, length].

    Args:
        words: Elements of the box in row-major order, flat.
        start: Index of the first element of the box.
        shape: Shape of the box.
        global_shape: Shape of the tensor.
    """
    rest = words
    for runs in flat_runs(start, shape, global_shape):
        count = runs.count * runs.length
        yield runs, rest[:count].reshape(runs.count, runs.length)
        rest = rest[count:]


def row_major(shape: Index) -> Index:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _with(index: Index, dim: int, value: int) -> Index:
    """Return an index with another value in one dim."""
    return (*index[:dim], value, *index[dim + 1 :])
