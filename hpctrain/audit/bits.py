"""Checksums of the bits of tensors, and the majority of copies."""

from __future__ import annotations

import torch
from torch import Tensor

COPIES = 3
"""Number of copies that ranks send of what they compare."""

WORD_MODULUS = 1 << 32
"""Modulus of `word_sum`.

The sums of parts add up to that of the whole modulo this number, if parts begin at words.
"""

_WORD_BYTES = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ELEMENTS = 1 << 18  # fits into the second-level cache of a processor


def word_sum(values: Tensor) -> Tensor:
    """Return the wrapping sum of the 32-bit words of a flat tensor, which changes if any single bit changes.

    Local. The sum does not depend on where the tensor lies in
    memory. On a GPU it is queued on the current stream, and the host does not wait.

    Args:
        values: Contiguous tensor with one dim, of any dtype of 1, 2, 4 or 8 bytes.

    Returns:
        An int32 tensor without dims, on the device of `values`; 0 for an empty tensor.
    """
    each = max(1, _WORD_BYTES // values.itemsize)
    if values.storage_offset() % each:
        total = torch.zeros((), dtype=torch.int32, device=values.device)
        for part in values.split(_CHUNK_ELEMENTS):
            total += word_sum(part.clone())
        return total
    bits = values.view(torch.int32) if values.itemsize == 2 * _WORD_BYTES else integers_of(values)
    if each == 1:
        return bits.sum(dtype=torch.int32)
    last = len(bits) // each * each
    total = bits[:last].view(torch.int32).sum(dtype=torch.int32)
    return total + bits[last:].sum(dtype=torch.int32) if last < len(bits) else total


def integers_of(values: Tensor) -> Tensor:
    """Return a view of a tensor as integers of the same size, which have its bits."""
    return values.view(_INTEGERS[values.itemsize])


def majority(copies: Tensor) -> Tensor:
    """Return the bitwise majority of three copies of integers: each bit as at least two copies have it.

    Local.

    Args:
        copies: Tensor of any integer dtype, `[n, 3, ...]`, whose three slices along dim 1 are the copies.

    Returns:
        A new tensor `[n, ...]` of the same dtype.
    """
    one, two, three = copies.unbind(1)
    return (one & two) | (one & three) | (two & three)
