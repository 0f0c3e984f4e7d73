"""Tensors of files that hold the matrices of all experts in another order than here.

Native tensors are [experts, 2, features, inputs] with gates first, or [experts, outputs, inputs]; biases are
the same without the last dim. In files the rows of gate and up are concatenated (GraniteMoE) or interleaved
(gpt-oss), and matrices can be [inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

Index = tuple[int, ...]
ReadBox = Callable[[Index, Index], Tensor]
"""Function that returns a box of a tensor of a file, given its first index and its extent."""

GateOrder = Literal["concatenated", "interleaved", "none"]
"""All rows of the gate before those of up, rows of both in turn, or no gate."""

_GATES = 2
"""Number of matrices in a tensor with gates: gate and up."""


@dataclass(frozen=True)
class ExpertOrder:
    """Order of the elements of a native tensor of all experts in a file.

    Attributes:
        shape: Shape of the native tensor.
        gates: Order of the rows of gate and up in the file.
        transposed: True if the file has [inputs, outputs].
        matrices: True for weights, False for biases.
    """

    shape: Index
    gates: GateOrder
    transposed: bool
    matrices: bool

    @property
    def file_shape(self) -> Index:
        """Shape of the tensor in a file."""
        rows = self.shape[1:] if self.gates == "none" else (_GATES * self.shape[2], *self.shape[3:])
        return (self.shape[0], *(rows[::-1] if self._swaps else rows))

    @property
    def _swaps(self) -> bool:
        return self.transposed and self.matrices

    def in_our_order(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a view of the tensor of a file that has the native shape."""
        if self._swaps:
            array = array.swapaxes(1, 2)
        if self.gates != "none":
            count, features, rest = self.shape[0], self.shape[2], self.shape[3:]
            order = (_GATES, features) if self.gates == "concatenated" else (features, _GATES)
            array = array.reshape(count, *order, *rest)
        view: NDArray[Any] = array.swapaxes(1, 2) if self.gates == "interleaved" else array
        return view

    def read(self, read_box: ReadBox, start: Index, shape: Index) -> Tensor:
        """Return the box `shape` at `start` of the native tensor, read from a file."""
        if self.gates == "none":
            return self._rows(read_box, start, shape)
        of_expert, inner = (start[0], start[3:]), (shape[0], shape[3:])
        if self.gates == "interleaved":
            first, extent = _GATES * start[2], _GATES * shape[2]
            rows = self._rows(read_box, (of_expert[0], first, *of_expert[1]), (inner[0], extent, *inner[1]))
            both: Tensor = rows.unflatten(1, (shape[2], _GATES)).transpose(1, 2)
            return both[:, start[1] : start[1] + shape[1]]
        parts = [
            self._rows(
                read_box,
                (of_expert[0], place * self.shape[2] + start[2], *of_expert[1]),
                (inner[0], shape[2], *inner[1]),
            )
            for place in range(start[1], start[1] + shape[1])
        ]
        return torch.stack(parts, 1)

    def _rows(self, read_box: ReadBox, start: Index, shape: Index) -> Tensor:
        """Return a box [experts, rows, inputs], or [experts, rows] of biases."""
        if not self._swaps:
            return read_box(start, shape)
        swapped = [(each[0], each[2], each[1]) for each in (start, shape)]
        return read_box(*swapped).transpose(1, 2)
