"""The product of two quantized matrices."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hpctrain.parallel.fp8.formats import E4M3, E5M2, expanded
from hpctrain.parallel.fp8.quantize import QuantizedTensor, ScaleBlocks, Scaling

UNIT = 16
"""Of sizes of matrices that GPUs multiply in these formats."""


def multiply_quantized(left: QuantizedTensor, right: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return left [m, k] right [n, k]^T in `dtype` [m, n], added up in fp32.

    The device's own product computes it where it has one, or else one of the same numbers in 16 or 32 bits.
    A product in fp64, which only the layout check asks for, is added up in fp64.

    No element along k has a scale of its own: that would be a matrix which was quantized for its transposed
    one's product.
    """
    assert left.blocks.columns != 1 and right.blocks.columns != 1, (left.blocks, right.blocks)
    if is_native(left, right, dtype):
        return native_product(left, right, dtype)
    return emulated_product(left, right, dtype)


def is_native(left: QuantizedTensor, right: QuantizedTensor, dtype: torch.dtype) -> bool:
    """Whether the device multiplies these in 8 bits, for a result in `dtype`."""
    pair = {left.form, right.form}
    if not (left.scaled_alike and right.scaled_alike) or pair == {E5M2}:
        return False
    sizes = (*left.values.shape, right.values.shape[0])
    by_row = left.blocks.rows is not None
    if by_row != (right.blocks.rows is not None) or any(size % UNIT or not size for size in sizes):
        return False
    return has_native(left.values.device, by_row, dtype)


@cache
def has_native(device: torch.device, by_row: bool, dtype: torch.dtype) -> bool:
    """Whether a device has products in 8 bits, of one scale for a matrix or for each row.

    Torch's own product on a CPU does not count: it expands both matrices, too, to the same result, and takes
    longer.
    """
    if device.type != "cuda" or not hasattr(torch, "_scaled_mm"):
        return False
    one = Scaling(ScaleBlocks(1 if by_row else None)).quantized(torch.ones(UNIT, UNIT, device=device), E4M3)
    try:
        native_product(one, one, dtype)
    except (RuntimeError, ValueError):
        return False
    return True


def native_product(left: QuantizedTensor, right: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """left [m, k] right [n, k]^T by `torch._scaled_mm`, of one scale for a matrix or for each row."""
    return torch._scaled_mm(
        left.values.contiguous(),
        right.values.contiguous().t(),
        scale_a=left.factors,
        scale_b=right.factors.t().contiguous(),
        out_dtype=dtype,
    )


def emulated_product(left: QuantizedTensor, right: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return the product by one in another format, which represents all quantized numbers exactly.

    Where a row has one scale it is multiplied by afterwards.
    """
    exact = dtype if dtype in {torch.bfloat16, torch.float64} else torch.float32
    if left.scaled_alike and right.scaled_alike:
        product = expanded(left.values, exact) @ expanded(right.values, exact).t()
        return product.mul_(left.factors.to(exact)).mul_(right.factors.t().to(exact)).to(dtype)
    return (left.dequantized(exact) @ right.dequantized(exact).t()).to(dtype)
