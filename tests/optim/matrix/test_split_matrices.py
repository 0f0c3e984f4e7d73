"""Each matrix in pieces is transformed once, by one of its ranks, and each rank gets its piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.comm.world import World
from hpctrain.costs.update_bytes import exchange_bytes
from hpctrain.optim.matrix.split_matrices import MatrixExchange, SplitMatrix
from tests.optim.matrix.test_matrix_optimizer import Held


def blocks_of(world: World) -> list[SplitMatrix]:
    """Return matrices split by rows or columns. Some ranks have padding, or nothing, of the last ones."""
    size, group, found = world.size, world.everyone, []
    for rows, columns, dim in [
        (8, 16, 0),
        (16, 8, 1),
        (24, 40, 1),
        (24, 40, 0),
        (7, 5, 0),
        (5, 9, 1),
        (16, 8, 0),
    ]:
        shape = [rows, columns]
        local = list(shape)
        local[dim] = -(-shape[dim] // size)
        starts = [
            [min(local[axis] * rank, shape[axis]) * (axis == dim) for axis in (0, 1)] for rank in range(size)
        ]
        extents = [[min(local[axis], shape[axis] - start[axis]) for axis in (0, 1)] for start in starts]
        found.append(
            SplitMatrix((rows, columns), (local[0], local[1]), group, starts, extents, float(rows * columns))
        )
    return found


def whole_of(number: int, block: SplitMatrix) -> Tensor:
    return torch.randn(block.shape, generator=torch.Generator().manual_seed(number))


def plain(whole: Tensor) -> Tensor:
    """Return a matrix in which each element depends on all others."""
    return whole.cumsum(0).cumsum(1).flip(0, 1) / whole.abs().max()


def piece(whole: Tensor, block: SplitMatrix, rank: int, padding: float = 0.0) -> Tensor:
    """Return a rank's piece, computed element by element."""
    found = torch.full(block.local, padding)
    for row in range(block.local[0]):
        for column in range(block.local[1]):
            at = block.starts[rank][0] + row, block.starts[rank][1] + column
            if at[0] < block.shape[0] and at[1] < block.shape[1]:
                found[row, column] = whole[at]
    return found


@pytest.mark.mpi(min_size=2, max_size=4)
def test_each_matrix_is_transformed_by_one_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of the whole matrix. Pieces of the next round are sent before it is transformed."""
    blocks, events = blocks_of(world), list[Any]()
    division = MatrixExchange(world.everyone, blocks, range(len(blocks)), torch.float32)
    start = world.everyone.start_all_to_all

    def noted(*arguments: Any, **named: Any) -> Any:
        events.append("send")
        return start(*arguments, **named)

    def transform(number: int, whole: Tensor) -> Tensor:
        assert torch.equal(whole, whole_of(number, blocks[number]))
        events.append(number)
        return plain(whole)

    monkeypatch.setattr(world.everyone, "start_all_to_all", noted)
    results: dict[int, Tensor] = {}
    division.run(
        lambda number: piece(whole_of(number, blocks[number]), blocks[number], world.rank, 9.0),
        transform,
        lambda number, result: results.update({number: result.clone()}),
    )
    for number, block in enumerate(blocks):
        expected = piece(plain(whole_of(number, block)), block, world.rank)
        assert torch.equal(results[number], expected), number
    assert events[:2] == ["send", "send"]
    assert events.count("send") == 2 * -(-len(blocks) // world.size)
    mine = [each for each in events if each != "send"]
    everyone = world.everyone.all_gather_object(mine)
    assert sorted(number for each in everyone for number in each) == list(range(len(blocks)))
    assert max(map(len, everyone)) - min(map(len, everyone)) <= 1


@pytest.mark.mpi(min_size=2, max_size=4)
def test_temporary_memory_is_the_predicted_one(world: World) -> None:
    """The largest matrices are in three rounds, which are in flight at the same time."""
    blocks = [each for each in blocks_of(world) for _ in range(8)]
    division = MatrixExchange(world.everyone, blocks, range(len(blocks)), torch.float32)
    told = exchange_bytes(
        division, [4 * block.elements for block in blocks], [8 * block.shape[0] for block in blocks]
    )
    with Held() as held:
        division.run(
            lambda number: torch.ones(blocks[number].local),
            lambda number, whole: whole.mul_(torch.ones(2 * blocks[number].shape[0]).sum()),
            lambda *_: None,
        )
    assert 0 <= held.most - told <= 16


def test_the_rank_with_the_least_work_gets_the_largest_matrix_of_a_round() -> None:
    group = planned_group(("tensor",), 0, 2, Ledger())
    works = [500.0, 960.0, 700.0, 800.0]
    pieces = [[0, 0], [2, 0]], [[2, 4], [2, 4]]
    blocks = [SplitMatrix((4, 4), (2, 4), group, *pieces, work) for work in works]
    assert MatrixExchange(group, blocks, range(4), torch.float32).rounds == [[1, 3], [0, 2]]


@pytest.mark.mpi(min_size=2, max_size=4)
def test_ranks_with_pieces_of_different_matrices_are_found(world: World) -> None:
    blocks = blocks_of(world)
    MatrixExchange(world.everyone, [], [], torch.float32)
    with pytest.raises(RuntimeError, match="pieces of different matrices"):
        MatrixExchange(world.everyone, blocks, [number * world.rank for number in range(7)], torch.float32)
