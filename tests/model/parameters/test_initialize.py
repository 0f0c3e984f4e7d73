"""Initial values of pieces, against those of the whole."""

from __future__ import annotations

import torch

from hpctrain.model.parameters.initialize import fill_normal
from hpctrain.parallel.shards import Shard


def test_a_piece_has_the_values_of_the_whole_and_zeros_beyond_it() -> None:
    whole = torch.empty(5 * 3)
    fill_normal(whole, 0, Shard.replicated("table", (5, 3)), 1, 1.0)
    assert whole.unique().numel() == 15
    padded = Shard("table", (5, 3), (3, 0), (8, 3))  # two rows, and six of padding
    expected = torch.cat((whole[9:], torch.zeros(18)))
    for first in range(24):
        for last in range(first + 1, 25):
            piece = torch.full((last - first,), torch.nan)
            fill_normal(piece, first, padded, 1, 1.0)
            assert torch.equal(piece, expected[first:last]), (first, last)
