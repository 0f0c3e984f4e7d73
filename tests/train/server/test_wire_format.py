"""How pieces travel: of tables the touched rows, of which a piece may have a part."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.train.server.wire_format import ServedRange, WireFormat, embedding_row_sizes
from tests.engines import small_deck, trainer

ROWS, ROW = 9, 5


@pytest.mark.parametrize("start", [0, 3, 5, 7, 20])
@pytest.mark.parametrize("stop", [21, 24, 25, 44, 45])
def test_a_pieces_rows_are_those_of_the_table(start: int, stop: int) -> None:
    """Whatever rows are touched, and wherever the piece is cut."""
    table = torch.randn(ROWS, ROW)
    piece = ServedRange("table", start, stop, ROW)
    values = table.flatten()[start:stop].clone()
    for seed in range(20):
        torch.manual_seed(seed)
        touched = torch.randperm(ROWS)[: 1 + seed % ROWS].sort().values
        rows = piece.rows(touched)
        taken = piece.take(values, rows)
        given = torch.zeros(ROWS, ROW)
        given[rows] = taken
        inside = torch.zeros(ROWS * ROW, dtype=torch.bool)
        inside[start:stop] = True
        wanted = torch.zeros(ROWS, ROW)
        wanted[rows] = table[rows]
        assert torch.equal(given.flatten(), torch.where(inside, wanted.flatten(), 0))
        # Only rows that it has something of travel, and all touched ones of these.
        has = inside.view(ROWS, ROW).any(1)
        assert rows.tolist() == [row for row in touched.tolist() if has[row]]
        back = torch.full_like(values, 7.0)
        piece.put(back, rows, taken)
        expected = torch.full((ROWS, ROW), 7.0)
        expected[rows] = table[rows]
        assert torch.equal(back, expected.flatten()[start:stop])


def test_what_is_packed_is_unpacked_and_as_long_as_said() -> None:
    wire = WireFormat([ServedRange("a", 0, 4), ServedRange("table", 3, 13, 5), ServedRange("b", 2, 3)])
    values = [torch.randn(piece.elements) for piece in wire.pieces]
    rows = wire.rows({"table": torch.tensor([0, 2])})
    packed = wire.pack(values, rows)
    assert packed.numel() == wire.length([2]) == 4 + 2 * 5 + 1
    into = [torch.zeros_like(each) for each in values]
    wire.unpack(packed, into, rows)
    assert torch.equal(into[0], values[0]) and torch.equal(into[2], values[2])
    # Of rows 0 and 2 the piece has elements 3, 4 and 10 to 12; row 1 did not travel.
    assert torch.equal(into[1], values[1] * torch.tensor([1, 1, 0, 0, 0, 0, 0, 1, 1, 1]))
    whole = wire.pack(values, None)
    assert whole.numel() == wire.length(None) == wire.elements == 15
    wire.unpack(whole, into, None)
    assert all(map(torch.equal, into, values))


def test_the_table_is_one_of_rows_unless_the_head_uses_it_too(world: World) -> None:
    """Learned positions are used whole."""
    alone = world.single_rank_world()
    untied = trainer(alone, small_deck("model.tied=false")).engine.stage.models
    assert embedding_row_sizes(untied) == {"embedding.tokens.weight": 32}
    assert embedding_row_sizes(trainer(alone, small_deck("model.tied=true")).engine.stage.models) == {}
