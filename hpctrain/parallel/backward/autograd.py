"""Helpers for autograd functions: cheap calls, exchanges among ranks, and the start of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return the result of an autograd function.

    Without gradients, as in generation and evaluation, it only calls the forward pass, which takes a few
    microseconds instead of twenty.

    Args:
        function: Function whose forward pass only saves tensors in its context and sets attributes of it.
        arguments: Arguments of the function.
    """
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoContext(), *arguments)


class _NoContext:
    """Context of a forward pass without a backward pass."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save nothing."""


def exchange(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `forward(x)`, whose backward pass applies `backward` to the gradient.

    The functions make opposite exchanges among ranks, such as to gather a tensor and to take a slice of it.
    A function may also return its argument, or only start an exchange.
    """
    result: Tensor = _ExchangeAutograd.apply(x, forward, backward)
    return result


class _ExchangeAutograd(torch.autograd.Function):
    """Exchange of a tensor among ranks, and the opposite exchange of its gradient."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.exchange_gradient = backward
        result = forward(x)
        return result.view_as(result) if result is x else result

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange_gradient(gradient), None, None


class BackwardStart:
    """Last tensor of a graph, at which a backward pass starts with a given gradient.

    It keeps the graph, but not the memory of the tensor. `torch.autograd.backward` with a gradient would do
    the same, but it imports a library of symbolic algebra: 37 MB and a second on every rank.

    Args:
        tensor: Last tensor of the graph.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tensor.shape
        self._gradient: list[Tensor] = []
        self._scalar: Tensor = _Begin.apply(tensor, self._gradient)

    def backward(self, gradient: Tensor | None = None) -> None:
        """Run the backward pass, which is possible once.

        Args:
            gradient: Gradient of the tensor. None is a gradient of one, for a scalar.
        """
        if gradient is None:
            gradient = torch.ones((), dtype=self._scalar.dtype, device=self._scalar.device)
        assert gradient.shape == self._shape, (gradient.shape, self._shape)
        self._gradient.append(gradient)
        torch.autograd.backward(self._scalar)


class _Begin(torch.autograd.Function):
    """Function with an arbitrary scalar as its result; its backward pass returns the given gradient."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return tensor.new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


def as_features(rows: Tensor) -> Tensor:
    """Return rows [m, features] as [1, 1, m, features], in which form an ActivationStore compresses them.

    It leaves what a router saves of tokens, which has fewer dims, as it is.
    """
    return rows[None, None]
