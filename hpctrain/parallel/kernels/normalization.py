"""LayerNorm and RMSNorm with any combination of weight, offset of the weight and bias.

Statistics and products are computed in fp32, as `transformers` does. The backward pass computes the
normalized features again, so that only the input and one or two numbers per row are saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.parallel.backward.autograd import apply_function


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, centered: bool, epsilon: float, offset: float = 0.0
) -> Tensor:
    """Return x normalized over its last dim, times `weight + offset`, plus `bias`.

    Args:
        x: Features [..., h].
        weight: Weight [h]; None for none, and then no factor.
        bias: Bias [h]; None for none.
        centered: True for LayerNorm, False for RMSNorm.
        epsilon: Number that is added to the variance or the mean square.
        offset: Number that is added to the weight.
    """
    result: Tensor = apply_function(_Normalization, x, weight, bias, centered, epsilon, offset)
    return result


class _Normalization(torch.autograd.Function):
    """`normalize` with a backward pass that saves x and the statistics of each row, not the result."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        centered: bool,
        epsilon: float,
        offset: float,
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.mean(-1, keepdim=True) if centered else None
        if mean is not None:
            wide = wide - mean
        inverse = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        result = wide * inverse
        if weight is not None:
            result.mul_(weight.to(wide.dtype) + offset)
        if bias is not None:
            result.add_(bias.to(wide.dtype))
        ctx.offset = offset
        ctx.save_for_backward(x, weight, inverse, mean)
        return result.to(x.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse, mean = ctx.saved_tensors
        wide, normal = gradient.to(inverse.dtype), x.to(inverse.dtype)
        normal = (normal if mean is None else normal - mean) * inverse
        grad_weight = grad_bias = None
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = _sum_rows(wide * normal).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = _sum_rows(wide).to(gradient.dtype)
        if weight is not None:
            wide = wide * (weight.to(wide.dtype) + ctx.offset)
        projection = (wide * normal).mean(-1, keepdim=True)
        grad_x = wide - normal * projection
        if mean is not None:
            grad_x -= wide.mean(-1, keepdim=True)
        return (grad_x * inverse).to(x.dtype), grad_weight, grad_bias, None, None, None


def _sum_rows(x: Tensor) -> Tensor:
    """Return the sum [h] of x [..., h], over sequence and batch first if there are heads."""
    return x.sum((0, 1)).sum(0) if x.dim() == 4 else x.sum(tuple(range(x.dim() - 1)))
