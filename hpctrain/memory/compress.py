"""Compression of saved activations to bf16, or to 8 bits with a scale for each block of elements.

The relative error of bf16 is at most 2^-8 of the element, that of int8 at most max|block| / 254, before the
result is rounded to the format of the activations. A block with an element that is not finite has no finite
element after `expand`, so that an overflow is still detected.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ActivationFormat = Literal["exact", "bf16", "int8"]

BLOCK = 256  # elements that share a scale


def compress(values: Tensor, form: ActivationFormat) -> Tensor:
    """Return flat floating-point values as bytes [n] uint8, from which `expand` restores approximations.

    If the format does not change the values, the result is a view of their memory.
    """
    if form == "exact" or (form == "bf16" and values.element_size() <= 2):
        return values.view(torch.uint8)
    if form == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    count = -(-values.numel() // BLOCK)
    blocks = values.new_zeros(count * BLOCK)
    blocks[: values.numel()] = values
    blocks = blocks.view(count, BLOCK).float()
    scales = blocks.abs().amax(1, keepdim=True) / 127
    # Zeros have the scale 0: divide them by 1 instead.
    rounded = (blocks / scales.masked_fill(scales == 0, 1)).round_().to(torch.int8)
    return torch.cat((rounded.view(-1).view(torch.uint8), scales.view(-1).view(torch.uint8)))


def expand(stored: Tensor, form: ActivationFormat, length: int, dtype: torch.dtype) -> Tensor:
    """Return the flat values [length] from the result of `compress`.

    Args:
        stored: Result of `compress`.
        form: Its format.
        length: Number of values.
        dtype: Dtype of the values.
    """
    if form == "exact" or (form == "bf16" and dtype.itemsize <= 2):
        return stored.view(dtype)
    if form == "bf16":
        return stored.view(torch.bfloat16).to(dtype)
    count = -(-length // BLOCK)
    rounded = stored[: count * BLOCK].view(torch.int8).view(count, BLOCK)
    scales = stored[count * BLOCK :].view(torch.float32).unsqueeze(1)
    return (rounded.float() * scales).view(-1)[:length].to(dtype)
