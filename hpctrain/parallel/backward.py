"""Where a backward pass begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BackwardStart:
    """The end of a graph: a backward pass begins here, with the gradient of the tensor that it was made of.

    Keeps the graph and not the tensor's memory. `torch.autograd.backward` with a gradient would do the same,
    but imports a library of symbolic algebra with it: 37 MB and a second of every rank.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tensor.shape
        self._gradient: list[Tensor] = []
        self._scalar: Tensor = _Begin.apply(tensor, self._gradient)

    def backward(self, gradient: Tensor | None = None) -> None:
        """Go back from here, once; without a gradient it is one, of a scalar."""
        if gradient is None:
            gradient = torch.ones((), dtype=self._scalar.dtype, device=self._scalar.device)
        assert gradient.shape == self._shape, (gradient.shape, self._shape)
        self._gradient.append(gradient)
        torch.autograd.backward(self._scalar)


class _Begin(torch.autograd.Function):
    """A scalar of no meaning, in whose backward the gradient comes from elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None
