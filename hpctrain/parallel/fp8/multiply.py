"""Product of two quantized matrices: by the device in 8 bits, or emulated with the same numbers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hpctrain.parallel.fp8.formats import E4M3, E5M2, upcast
from hpctrain.parallel.fp8.quantize import QuantizedTensor, ScaleBlocks, Scaling
from hpctrain.parallel.fp8.recipes import ScalingRecipe

UNIT = 16
"""GPUs multiply matrices in 8 bits whose sizes are multiples of this."""


def multiply_quantized(left: QuantizedTensor, right: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return left [m, k] right [n, k]^T in `dtype` [m, n], added up in fp32.

    The device multiplies in 8 bits if it can, else the same numbers in 16 or 32 bits. A product in fp64,
    which only the layout check needs, is summed in fp64.

    Args:
        left: Matrix [m, k].
        right: Matrix [n, k]. In neither matrix may each element along k have a scale of its own, as in one
            that was quantized for the product of its transpose.
        dtype: Format of the result.
    """
    assert left.blocks.columns != 1 and right.blocks.columns != 1, (left.blocks, right.blocks)
    if is_native(left, right, dtype):
        return native_product(left, right, dtype)
    return emulated_product(left, right, dtype)


def is_native(left: QuantizedTensor, right: QuantizedTensor, dtype: torch.dtype) -> bool:
    """Return True if the device multiplies two matrices in 8 bits, for a result in `dtype`."""
    pair = {left.form, right.form}
    if not (left.has_row_scales and right.has_row_scales) or pair == {E5M2}:
        return False
    sizes = (*left.values.shape, right.values.shape[0])
    by_row = left.blocks.rows is not None
    if by_row != (right.blocks.rows is not None) or any(size % UNIT or not size for size in sizes):
        return False
    return has_native(left.values.device, by_row, dtype)


@cache
def has_native(device: torch.device, by_row: bool, dtype: torch.dtype) -> bool:
    """Return True if a device has products in 8 bits.

    torch's product on a CPU does not count: it also expands both matrices, and takes longer.

    Args:
        device: The device.
        by_row: True for one scale for each row, False for one for each matrix.
        dtype: Format of the result.
    """
    if device.type != "cuda" or not hasattr(torch, "_scaled_mm"):
        return False
    one = Scaling(ScaleBlocks(1 if by_row else None)).quantize(torch.ones(UNIT, UNIT, device=device), E4M3)
    try:
        native_product(one, one, dtype)
    except (RuntimeError, ValueError):
        return False
    return True


def native_products(recipe: ScalingRecipe, device: torch.device) -> str:
    """Return which products of a recipe a device computes in 8 bits.

    Returns:
        "all", "stored" for those with a result in bf16 (forward and input gradient), or "none".
    """
    if any(scaling.blocks.columns is not None for scaling in (recipe.tokens, recipe.weights)):
        return "none"
    by_row = recipe.tokens.blocks.rows is not None
    if not has_native(device, by_row, torch.bfloat16):
        return "none"
    return "all" if has_native(device, by_row, torch.float32) else "stored"


def native_product(left: QuantizedTensor, right: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return left [m, k] right [n, k]^T by `torch._scaled_mm`, with a scale for a matrix or each row."""
    return torch._scaled_mm(
        left.values.contiguous(),
        right.values.contiguous().t(),
        scale_a=left.fp32_scales,
        scale_b=right.fp32_scales.t().contiguous(),
        out_dtype=dtype,
    )


def emulated_product(left: QuantizedTensor, right: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the product by one in another format, which represents all quantized numbers exactly.

    If each row has one scale, the product is multiplied by it.
    """
    exact = dtype if dtype in {torch.bfloat16, torch.float64} else torch.float32
    if left.has_row_scales and right.has_row_scales:
        product = upcast(left.values, exact) @ upcast(right.values, exact).t()
        return product.mul_(left.fp32_scales.to(exact)).mul_(right.fp32_scales.t().to(exact)).to(dtype)
    return (left.dequantized(exact) @ right.dequantized(exact).t()).to(dtype)
