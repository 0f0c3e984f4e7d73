"""Fingerprints of what ranks hold: sums over its bits, which any single bit that changes changes, too."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.audit.bits import word_sum as of_tensor
from hpctrain.memory.scratch import Flat, read_pieces

WORDS = 1 << 32
"""Sums of fingerprints of parts are those of the whole but for multiples of it, if parts begin with words."""

_PIECE = 1 << 18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(values: Flat) -> Tensor:
    """The sum of a flat tensor's words of 32 bits, an int64 0-dim on its device: that of memory wraps."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for _, piece in read_pieces(values):
        total += of_tensor(piece)
    return total


class PlacedFingerprints:
    """Sums over bits of values of which it matters where they lie, too: those that change places are found.

    In memory that is taken once: pieces that come and go between what stays would leave holes that the C
    library keeps, as large as the model.
    """

    def __init__(self) -> None:
        self._rooms: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def of(self, values: Flat, position: int = 0) -> Tensor:
        """An int64 sum over the bits of `values`, the first of them at `position`, which matters."""
        if values.device not in self._rooms:
            odd = torch.arange(3, 2 * _PIECE + 3, 2, device=values.device)
            self._rooms[values.device] = odd, torch.empty_like(odd)
        odd, room = self._rooms[values.device]
        total = torch.zeros((), dtype=torch.int64, device=values.device)
        for _, read in read_pieces(values):
            for piece in read.reshape(-1).split(_PIECE):
                bits = room[: piece.numel()]
                bits.copy_(piece.view(_BITS[piece.element_size()]))
                # Each is multiplied by the odd number of its position.
                total += bits.sum() * (2 * position)
                total += bits.mul_(odd[: len(bits)]).sum()
                position += len(bits)
        return total
