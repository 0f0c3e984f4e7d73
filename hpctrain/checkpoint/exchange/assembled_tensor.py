"""Tensors that are made of boxes of other tensors, without any element in memory.

`transformers` stores some weights in other tensors than its models have: one for each expert, or queries,
keys and values apart. Its own conversions stack, concatenate and split them. They run here on an
AssembledTensor, which records where each element comes from. So the layout of files follows from the code of
the installed version, and each rank reads no more than its piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Index = tuple[int, ...]


@dataclass(frozen=True)
class SourceBox:
    """Box of an AssembledTensor that is a box of one source tensor.

    Attributes:
        source: Name of the source tensor.
        start: First index in the assembled tensor.
        shape: Extent in the assembled tensor.
        axes: Dim of the source for each dim of the assembled tensor; None for a dim that the source lacks.
        source_start: First index in the source tensor. Its dims that are not in `axes` have extent 1.
    """

    source: str
    start: Index
    shape: Index
    axes: tuple[int | None, ...]
    source_start: Index

    @property
    def source_shape(self) -> Index:
        """Extent in the source tensor."""
        shape = [1] * len(self.source_start)
        for axis, extent in zip(self.axes, self.shape, strict=True):
            if axis is not None:
                shape[axis] = extent
        return tuple(shape)

    def within(self, start: Index, shape: Index) -> SourceBox | None:
        """Return the part of this box in a box of the assembled tensor; None if there is none."""
        low = tuple(map(max, self.start, start))
        high = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, start, shape, strict=True)]
        extent = tuple(end - first for first, end in zip(low, high, strict=True))
        if any(each <= 0 for each in extent):
            return None
        source_start = list(self.source_start)
        for axis, first, own in zip(self.axes, low, self.start, strict=True):
            if axis is not None:
                source_start[axis] += first - own
        return replace(self, start=low, shape=extent, source_start=tuple(source_start))

    def arrange(self, values: Tensor) -> Tensor:
        """Return the values of the source's box with the dims of the assembled tensor."""
        present = [axis for axis in self.axes if axis is not None]
        others = [axis for axis in range(values.dim()) if axis not in present]
        return values.permute([*present, *others]).reshape(self.shape)


class AssembledTensor:
    """Tensor that is made of boxes of other tensors. It has no values.

    torch's `stack`, `cat`, `chunk`, `split` and `transpose` accept it.

    Args:
        shape: Shape of the tensor.
        boxes: Boxes that fill it.
    """

    def __init__(self, shape: Index, boxes: Sequence[SourceBox]) -> None:
        self.shape, self.boxes = shape, tuple(boxes)

    @staticmethod
    def of(name: str, shape: Index) -> AssembledTensor:
        """Return a tensor that is one source tensor."""
        zeros, axes = (0,) * len(shape), tuple(range(len(shape)))
        return AssembledTensor(shape, [SourceBox(name, zeros, shape, axes, zeros)])

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
        return self.with_dims(
            self.shape[:dim] + self.shape[dim + 1 :], lambda each: each[:dim] + each[dim + 1 :]
        )

    def narrow(self, dim: int, first: int, extent: int) -> AssembledTensor:
        """Return the slice of a dim from `first` on."""
        start = tuple(first if each == dim else 0 for each in range(len(self.shape)))
        shape = (*self.shape[:dim], extent, *self.shape[dim + 1 :])
        found = [part for each in self.boxes if (part := each.within(start, shape)) is not None]
        return AssembledTensor(shape, [_moved(each, dim, -first) for each in found])

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
            inside = zip(each.start, start, each.shape, strict=True)
            values[tuple(slice(at - first, at - first + extent) for at, first, extent in inside)] = (
                each.arrange(piece)
            )
        return values

    def with_dims(
        self, shape: Index, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    ) -> AssembledTensor:
        """Return the tensor with other dims; `change` changes any tuple with one entry for each of them."""
        boxes = (
            replace(each, start=change(each.start), shape=change(each.shape), axes=change(each.axes))
            for each in self.boxes
        )
        return AssembledTensor(shape, [*boxes])


def _moved(box: SourceBox, dim: int, by: int) -> SourceBox:
    start = tuple(each + by * (number == dim) for number, each in enumerate(box.start))
    return replace(box, start=start)


def _cat(tensors: Sequence[AssembledTensor], dim: int = 0) -> AssembledTensor:
    boxes, end = list[SourceBox](), 0
    for each in tensors:
        boxes += [_moved(box, dim, end) for box in each.boxes]
        end += each.shape[dim]
    first = tensors[0].shape
    return AssembledTensor((*first[:dim], end, *first[dim + 1 :]), boxes)


def _stack(tensors: Sequence[AssembledTensor], dim: int = 0) -> AssembledTensor:
    def with_new_dim(each: AssembledTensor) -> AssembledTensor:
        boxes = [
            replace(
                box,
                start=(*box.start[:dim], 0, *box.start[dim:]),
                shape=(*box.shape[:dim], 1, *box.shape[dim:]),
                axes=(*box.axes[:dim], None, *box.axes[dim:]),
            )
            for box in each.boxes
        ]
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


def _transpose(tensor: AssembledTensor, dim0: int, dim1: int) -> AssembledTensor:
    order = [*range(len(tensor.shape))]
    order[dim0], order[dim1] = order[dim1], order[dim0]

    def change(each: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each[dim] for dim in order)

    return tensor.with_dims(change(tensor.shape), change)


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "cat": _cat,
    "stack": _stack,
    "split": lambda tensor, sizes, dim=0: tuple(_split(tensor, sizes, dim)),
    "chunk": _chunk,
    "transpose": _transpose,
}
