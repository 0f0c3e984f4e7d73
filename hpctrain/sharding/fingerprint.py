"""Sums over the bits of tensors, which change if any single bit does."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.audit.bits import word_sum as of_tensor
from hpctrain.memory.scratch import Flat, read_pieces

WORDS = 1 << 32
"""Modulus of fingerprints.

Those of parts add up to that of the whole modulo this number, if parts begin at words.
"""

_PIECE = 1 << 18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(values: Flat) -> Tensor:
    """Return the sum of the 32-bit words of a flat tensor, int64 0-dim on its device. It wraps."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for _, piece in read_pieces(values):
        total += of_tensor(piece)
    return total


class PlacedFingerprints:
    """Sums over the bits of values, weighted by position, so that exchanged values are detected.

    It reuses its scratch memory. Otherwise small allocations between long-lived ones would leave gaps that
    the C library cannot return, as large as the model.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def of(self, values: Flat, position: int = 0) -> Tensor:
        """Return the int64 sum, 0-dim, over the bits of `values`, the first of which has this position."""
        if values.device not in self._scratch:
            odd = torch.arange(3, 2 * _PIECE + 3, 2, device=values.device)
            self._scratch[values.device] = odd, torch.empty_like(odd)
        odd, scratch = self._scratch[values.device]
        total = torch.zeros((), dtype=torch.int64, device=values.device)
        for _, read in read_pieces(values):
            for piece in read.reshape(-1).split(_PIECE):
                bits = scratch[: piece.numel()]
                bits.copy_(piece.view(_BITS[piece.element_size()]))
                # Multiply each word by 2 position + 3, which is odd.
                total += bits.sum() * (2 * position)
                total += bits.mul_(odd[: len(bits)]).sum()
                position += len(bits)
        return total
