"""Saved activations in fewer bits: bf16, or 8 bits with a scale for each block of elements.

Relative error of bf16: at most 2^-8 of the element; of int8: at most max|block| / 254, before the result is
rounded to the activations' own format. A block with an element that is not finite comes back without any
that is, so that a step which overflowed is still seen to.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ActivationFormat = Literal["exact", "bf16", "int8"]

BLOCK = 256  # elements that share a scale


def compress(values: Tensor, form: ActivationFormat) -> Tensor:
    """Flat floating `values` as bytes [n] uint8, which `expand` turns into about the same values."""
    if form == "exact" or (form == "bf16" and values.element_size() <= 2):
        return values.view(torch.uint8)
    if form == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    count = -(-values.numel() // BLOCK)
    blocks = values.new_zeros(count * BLOCK)
    blocks[: values.numel()] = values
    blocks = blocks.view(count, BLOCK).float()
    scales = blocks.abs().amax(1, keepdim=True) / 127
    # A block of zeros has no scale: zeros come of any.
    rounded = (blocks / scales.masked_fill(scales == 0, 1)).round_().to(torch.int8)
    return torch.cat((rounded.view(-1).view(torch.uint8), scales.view(-1).view(torch.uint8)))


def expand(stored: Tensor, form: ActivationFormat, length: int, dtype: torch.dtype) -> Tensor:
    """The flat values [length] of `compress`."""
    if form == "exact" or (form == "bf16" and dtype.itemsize <= 2):
        return stored.view(dtype)
    if form == "bf16":
        return stored.view(torch.bfloat16).to(dtype)
    count = -(-length // BLOCK)
    rounded = stored[: count * BLOCK].view(torch.int8).view(count, BLOCK)
    scales = stored[count * BLOCK :].view(torch.float32).unsqueeze(1)
    return (rounded.float() * scales).view(-1)[:length].to(dtype)


def compress_peak(length: int, itemsize: int, form: ActivationFormat) -> int:
    """Bytes that `compress` of so many elements of `itemsize` bytes holds at the most beside them."""
    if form != "int8":
        return 2 * length if form == "bf16" and itemsize > 2 else 0
    padded = -(-length // BLOCK) * BLOCK
    copies = itemsize + (4 if itemsize < 4 else 0)
    return padded * (copies + 4 + 4)  # in fp32 their magnitudes, or later the rounded ones, and a quotient


def compressed_bytes(length: int, itemsize: int, form: ActivationFormat) -> int:
    """Bytes of `compress` of so many elements of `itemsize` bytes."""
    if form == "int8":
        return -(-length // BLOCK) * (BLOCK + 4)
    return length * (min(2, itemsize) if form == "bf16" else itemsize)
