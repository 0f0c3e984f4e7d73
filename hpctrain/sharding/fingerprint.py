"""Fingerprints of tensors: sums over their bits, which any single bit that changes changes, too.

Torch adds words of 32 bits as quickly as memory gives them, and lets sums of them wrap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.memory.scratch import Flat, to_read

WORDS = 1 << 32
"""Sums of fingerprints of parts are those of the whole but for multiples of it, if parts begin with words."""

_WORD = 4
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def fingerprint(values: Flat) -> Tensor:
    """The wrapping sum of a flat tensor's words, an int64 0-dim on its device."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for _, piece in to_read(values):
        total += _sum(piece)
    return total


def _sum(values: Tensor) -> Tensor:
    size, count = values.element_size(), values.numel()
    if size >= _WORD:
        return values.view(torch.int32).sum(dtype=torch.int32)
    # Words begin where memory is aligned to them: what is before and behind is added one by one.
    each = _WORD // size
    first = min(-values.storage_offset() % each, count)
    last = first + (count - first) // each * each
    bits = values.view(_BITS[size])
    ends = bits[:first].sum(dtype=torch.int64) + bits[last:].sum(dtype=torch.int64)
    return ends + values[first:last].view(torch.int32).sum(dtype=torch.int32) if last > first else ends
