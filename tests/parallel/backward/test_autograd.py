"""Autograd functions with and without gradients: the same values.

Tests of parallel/backward/autograd.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.parallel.backward.autograd import apply_function


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        assert not torch.is_grad_enabled()
        ctx.factor = factor
        ctx.save_for_backward(x)
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * 3 * x**2, None


def test_a_gradient_is_there_where_it_is_asked() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    result: Tensor = apply_function(_Cubed, x, 2.0)
    assert torch.equal(result, torch.tensor([2.0, 16.0]))
    (gradient,) = torch.autograd.grad(result.sum(), [x])
    assert torch.equal(gradient, torch.tensor([6.0, 24.0]))


def test_without_gradients_it_is_the_forward_pass() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with torch.no_grad():
        result: Tensor = apply_function(_Cubed, x, 2.0)
        expected: Tensor = _Cubed.apply(x, 2.0)
    assert torch.equal(result, expected)
    assert not result.requires_grad
    assert result.grad_fn is None
