"""Tensors that are made of elements of other tensors, without any element in memory.

`transformers` stores some weights in other tensors than its models have: one for each expert, or queries,
keys and values apart. Its own conversions stack, concatenate, split and reorder them. They run here on an
AssembledTensor, which records where each element comes from. So the layout of files follows from the code of
the installed version, and each rank reads no more than its piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

Index = tuple[int, ...]


@dataclass(frozen=True)
class BoxDim:
    """Dim of a SourceBox: elements that are equidistant in the assembled tensor and in the source.

    Attributes:
        start: First index in the assembled tensor.
        extent: Number of elements.
        axis: Dim of the source; None if the source lacks this dim, whose extent then is 1.
        step: Distance of two elements in the assembled tensor.
        source_step: Their distance in the source.
    """

    start: int
    extent: int
    axis: int | None
    step: int = 1
    source_step: int = 1


@dataclass(frozen=True)
class SourceBox:
    """Elements of an AssembledTensor that are elements of one source tensor.

    Attributes:
        source: Name of the source tensor.
        dims: Dims of the assembled tensor. Two of them may have the same dim of the source.
        source_start: First index in the source tensor.
    """

    source: str
    dims: tuple[BoxDim, ...]
    source_start: Index

    @property
    def shape(self) -> Index:
        """Number of elements of each dim."""
        return tuple(each.extent for each in self.dims)

    @property
    def source_shape(self) -> Index:
        """Extent in the source tensor, including what is between the elements."""
        shape = [1] * len(self.source_start)
        for each in self.dims:
            if each.axis is not None:
                shape[each.axis] += (each.extent - 1) * each.source_step
        return tuple(shape)

    def slices(self, start: Index) -> tuple[slice, ...]:
        """Return the place in a box of the assembled tensor whose first index is `start`."""
        return tuple(
            slice(each.start - first, each.start - first + each.extent * each.step, each.step)
            for each, first in zip(self.dims, start, strict=True)
        )

    def with_dims(self, dim: int, *dims: BoxDim, replaced: int = 1) -> SourceBox:
        """Return the box with other dims in the place of `replaced` dims from `dim` on."""
        return replace(self, dims=(*self.dims[:dim], *dims, *self.dims[dim + replaced :]))

    def part(self, dim: int, first: int, extent: int) -> SourceBox:
        """Return `extent` of the elements of a dim, from number `first` on."""
        own = self.dims[dim]
        part = replace(own, start=own.start + first * own.step, extent=extent)
        source_start = tuple(
            each + first * own.source_step * (axis == own.axis) for axis, each in enumerate(self.source_start)
        )
        return replace(self.with_dims(dim, part), source_start=source_start)

    def within(self, start: Index, shape: Index) -> SourceBox | None:
        """Return the part of this box in a box of the assembled tensor; None if there is none."""
        box = self
        for dim, (low, extent) in enumerate(zip(start, shape, strict=True)):
            own = self.dims[dim]
            first = max(0, -(-(low - own.start) // own.step))
            end = min(own.extent, -(-(low + extent - own.start) // own.step))
            if first >= end:
                return None
            box = box.part(dim, first, end - first)
        return box

    def moved(self, dim: int, by: int) -> SourceBox:
        """Return the box at another place of a dim of the assembled tensor."""
        return self.with_dims(dim, replace(self.dims[dim], start=self.dims[dim].start + by))

    def divided(self, dim: int, inner: int) -> Iterator[SourceBox]:
        """Yield the box where a dim has become two, of which the second has `inner` elements."""
        own, first = self.dims[dim], 0
        while first < own.extent:
            left = own.extent - first
            row, column = divmod(own.start + first * own.step, inner)
            if own.step > 1:
                rows, columns = 1, 1
            elif column or left < inner:
                rows, columns = 1, min(left, inner - column)
            else:
                rows, columns = left // inner, inner
            yield self.part(dim, first, rows * columns).with_dims(
                dim,
                BoxDim(row, rows, own.axis, 1, own.source_step * inner),
                BoxDim(column, columns, own.axis, 1, own.source_step),
            )
            first += rows * columns

    def merged(self, dim: int, inner: int) -> Iterator[SourceBox]:
        """Yield the box where a dim and the next one, with `inner` elements in the tensor, have become one.

        There is a box for each element of the shorter dim.
        """
        shorter = dim if self.dims[dim].extent <= self.dims[dim + 1].extent else dim + 1
        for number in range(self.dims[shorter].extent):
            box = self.part(shorter, number, 1)
            outer, last = box.dims[dim : dim + 2]
            longer = last if shorter == dim else replace(outer, step=outer.step * inner)
            joined = replace(longer, start=outer.start * inner + last.start)
            yield box.with_dims(dim, joined, replaced=2)

    def arrange(self, values: Tensor) -> Tensor:
        """Return the elements, with the dims of the assembled tensor, of the source's box in `values`."""
        strides = [
            0 if each.axis is None else each.source_step * values.stride(each.axis) for each in self.dims
        ]
        return values.as_strided(self.shape, strides)


class AssembledTensor:
    """Tensor that is made of elements of other tensors. It has no values.

    torch's `stack`, `cat`, `chunk`, `split` and `transpose` accept it.

    Args:
        shape: Shape of the tensor.
        boxes: Boxes that fill it.
    """

    def __init__(self, shape: Index, boxes: Iterable[SourceBox]) -> None:
        self.shape, self.boxes = shape, tuple(boxes)

    @staticmethod
    def of(name: str, shape: Index) -> AssembledTensor:
        """Return a tensor that is one source tensor."""
        dims = tuple(BoxDim(0, extent, axis) for axis, extent in enumerate(shape))
        return AssembledTensor(shape, [SourceBox(name, dims, (0,) * len(shape))])

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch on assembled tensors."""
        operation = _OPERATIONS.get(getattr(function, "__name__", ""))
        return NotImplemented if operation is None else operation(*arguments, **(keywords or {}))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Return the extent of a dim."""
        return self.shape[dim]

    def dim(self) -> int:
        """Return the number of dims."""
        return len(self.shape)

    def contiguous(self) -> AssembledTensor:
        """Return the tensor itself."""
        return self

    def squeeze(self, dim: int) -> AssembledTensor:
        """Return the tensor without a dim of extent 1."""
        assert self.shape[dim] == 1, self.shape
        boxes = (each.with_dims(dim) for each in self.boxes)
        return AssembledTensor(self.shape[:dim] + self.shape[dim + 1 :], boxes)

    def transpose(self, dim0: int, dim1: int) -> AssembledTensor:
        """Return the tensor with two dims exchanged."""
        order = [*range(self.ndim)]
        order[dim0], order[dim1] = order[dim1], order[dim0]
        boxes = (replace(each, dims=tuple(each.dims[dim] for dim in order)) for each in self.boxes)
        return AssembledTensor(tuple(self.shape[dim] for dim in order), boxes)

    def reshape(self, *shape: Any) -> AssembledTensor:
        """Return the tensor with another shape, given as a list or as sizes of which one may be -1."""
        sizes = [*(shape if isinstance(shape[0], int) else shape[0])]
        if -1 in sizes:
            sizes[sizes.index(-1)] = prod(self.shape) // -prod(sizes)
        tensor = self
        for dim, size in enumerate(sizes):
            if dim == tensor.ndim:
                tensor = tensor._divided(dim - 1, 1)
            while tensor.shape[dim] % size:
                tensor = tensor._merged(dim)
            if tensor.shape[dim] != size:
                tensor = tensor._divided(dim, tensor.shape[dim] // size)
        while tensor.ndim > len(sizes):
            tensor = tensor._merged(tensor.ndim - 2)
        return tensor

    view = reshape

    def _divided(self, dim: int, inner: int) -> AssembledTensor:
        shape = (*self.shape[:dim], self.shape[dim] // inner, inner, *self.shape[dim + 1 :])
        return AssembledTensor(shape, [part for each in self.boxes for part in each.divided(dim, inner)])

    def _merged(self, dim: int) -> AssembledTensor:
        outer, inner = self.shape[dim : dim + 2]
        shape = (*self.shape[:dim], outer * inner, *self.shape[dim + 2 :])
        return AssembledTensor(shape, [part for each in self.boxes for part in each.merged(dim, inner)])

    def narrow(self, dim: int, first: int, extent: int) -> AssembledTensor:
        """Return the slice of a dim from `first` on."""
        start = tuple(first if each == dim else 0 for each in range(self.ndim))
        shape = (*self.shape[:dim], extent, *self.shape[dim + 1 :])
        found = [part for each in self.boxes if (part := each.within(start, shape)) is not None]
        return AssembledTensor(shape, [each.moved(dim, -first) for each in found])

    def read(self, start: Index, shape: Index, read: Callable[[str, Index, Index], Tensor]) -> Tensor:
        """Return a box of the tensor, read from its sources.

        Args:
            start: First index of the box.
            shape: Extent of the box.
            read: Function that returns a box of a source, given its name, first index and extent.
        """
        parts = [part for each in self.boxes if (part := each.within(start, shape)) is not None]
        pieces = [(each, read(each.source, each.source_start, each.source_shape)) for each in parts]
        if len(pieces) == 1:
            return pieces[0][0].arrange(pieces[0][1])
        values = torch.empty(shape, dtype=pieces[0][1].dtype)
        for each, piece in pieces:
            values[each.slices(start)] = each.arrange(piece)
        return values


def _cat(tensors: Sequence[AssembledTensor], dim: int = 0) -> AssembledTensor:
    boxes, end = list[SourceBox](), 0
    for each in tensors:
        boxes += [box.moved(dim, end) for box in each.boxes]
        end += each.shape[dim]
    first = tensors[0].shape
    return AssembledTensor((*first[:dim], end, *first[dim + 1 :]), boxes)


def _stack(tensors: Sequence[AssembledTensor], dim: int = 0) -> AssembledTensor:
    def with_new_dim(each: AssembledTensor) -> AssembledTensor:
        boxes = [box.with_dims(dim, BoxDim(0, 1, None), replaced=0) for box in each.boxes]
        return AssembledTensor((*each.shape[:dim], 1, *each.shape[dim:]), boxes)

    return _cat([with_new_dim(each) for each in tensors], dim)


def _split(tensor: AssembledTensor, sizes: Sequence[int], dim: int = 0) -> Iterator[AssembledTensor]:
    first = 0
    for size in sizes:
        yield tensor.narrow(dim, first, size)
        first += size


def _chunk(tensor: AssembledTensor, chunks: int, dim: int = 0) -> tuple[AssembledTensor, ...]:
    total = tensor.shape[dim]
    size = -(-total // chunks)
    return tuple(_split(tensor, [min(size, total - first) for first in range(0, total, size)], dim))


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "cat": _cat,
    "stack": _stack,
    "split": lambda tensor, sizes, dim=0: tuple(_split(tensor, sizes, dim)),
    "chunk": _chunk,
    "transpose": AssembledTensor.transpose,
}
