"""Which part of a sequence a context rank holds."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.parallel.layer_context import ContextForm


def context_positions(group: Group, form: ContextForm, sequence: int) -> Tensor:
    """Global positions [sequence / c] int64 of this rank's piece.

    In a ring each rank holds one early and one late piece of 2c, which balances the causal work
    (Striped and zigzag ring attention); for the all-to-all form pieces follow each other.
    """
    rank, size = group.rank, group.size
    if size == 1:
        return torch.arange(sequence)
    if form == "all_to_all":
        return torch.arange(sequence).chunk(size)[rank].clone()
    pieces = torch.arange(sequence).chunk(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))


def context_piece(tokens: Tensor, positions: Tensor) -> Tensor:
    """[b, s] -> [s / c, b]: the columns at `positions`, sequence first."""
    if positions.numel() == tokens.shape[1]:
        return tokens.t().contiguous()
    return tokens.t()[positions]
