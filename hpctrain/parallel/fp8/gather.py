"""Pieces of tokens in 8 bits, sent to the ranks that have the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hpctrain.comm.group import Group
from hpctrain.parallel.fp8.quantize import QuantizedTensor


def start_gather(
    piece: QuantizedTensor, pieces: Group, blocking: bool = False
) -> Callable[[], QuantizedTensor]:
    """Have the rows of all ranks come, one's below the other's; what waits for them. Collective.

    They are what quantizing all of them at once gives where no block lies in two pieces, or where ranks have
    one scale of a block that does.
    """
    values = pieces.start_all_gather(piece.values.view(torch.uint8), blocking=blocking)
    of_rows = piece.blocks.rows is not None
    scales = pieces.start_all_gather(piece.scales, blocking=blocking) if of_rows else None

    def finish() -> QuantizedTensor:
        whole = values.wait().view(piece.values.dtype)
        return replace(piece, values=whole, scales=piece.scales if scales is None else scales.wait())

    return finish


def gathered(piece: QuantizedTensor, pieces: Group) -> QuantizedTensor:
    """As `start_gather`, at once."""
    return start_gather(piece, pieces, blocking=True)()
