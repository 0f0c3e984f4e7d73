"""Clamp of queries, keys and values to a bound right after their projection (OLMo 1.7)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.parallel.backward.autograd import apply_function

_ROUNDING = 2.0**-7
"""Largest relative error of saved activations in a format that rounds them, with room to spare."""


class QueryKeyValueClip:
    """Clamp of the features of a projection to [-bound, bound].

    It saves only its result, which attention saves as well. Features at the bound, or rounded to it by the
    dtype of activations, have no gradient.

    Args:
        bound: Largest absolute value.
        rounds: True if saved activations are rounded. Then features near the bound have no gradient either,
            since a clamped one may come back as one of them.
    """

    def __init__(self, bound: float, rounds: bool) -> None:
        self.bound, self.rounds = bound, rounds

    def __call__(self, x: Tensor) -> Tensor:
        """Return the clamped features."""
        bound = _in_dtype(self.bound, x.dtype)
        result: Tensor = apply_function(_Clipped, x, bound, bound * (1 - _ROUNDING) if self.rounds else bound)
        return result


@cache
def _in_dtype(bound: float, dtype: torch.dtype) -> float:
    """Return the bound as a tensor of this dtype holds it."""
    return float(torch.tensor(bound, dtype=dtype, device="cpu"))


class _Clipped(torch.autograd.Function):
    """Features that are clamped to a bound. They have a gradient if the result is below a threshold."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, bound: float, threshold: float) -> Tensor:
        result = x.clamp(-bound, bound)
        ctx.threshold = threshold
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        threshold: float = ctx.threshold
        return torch.ops.aten.hardtanh_backward(gradient, result, -threshold, threshold), None, None
