"""Gathering of quantized rows of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hpctrain.comm.group import Group
from hpctrain.parallel.fp8.quantize import QuantizedTensor


def start_gather_rows(
    piece: QuantizedTensor, group: Group, blocking: bool = False
) -> Callable[[], QuantizedTensor]:
    """Start to gather the rows of all ranks, in their order, and return a function that waits. Collective.

    The result is what quantizing all rows at once gives if no block has rows of two ranks, or if ranks use
    the same scale for such a block.

    Args:
        piece: Rows of this rank.
        group: Ranks that have the others.
        blocking: True if the caller waits at once.
    """
    values = group.start_all_gather(piece.values.view(torch.uint8), blocking=blocking)
    by_rows = piece.blocks.rows is not None
    scales = group.start_all_gather(piece.scales, blocking=blocking) if by_rows else None

    def finish() -> QuantizedTensor:
        rows = values.wait().view(piece.values.dtype)
        return replace(piece, values=rows, scales=piece.scales if scales is None else scales.wait())

    return finish


def gather_rows(piece: QuantizedTensor, group: Group) -> QuantizedTensor:
    """Return the rows of all ranks, as `start_gather_rows` gathers them. Collective."""
    return start_gather_rows(piece, group, blocking=True)()
