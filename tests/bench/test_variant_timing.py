"""Turns of what is timed: A B B A, losses of every step."""

from __future__ import annotations

from itertools import count

import pytest

from hpctrain.bench.variant_timing import TimedVariant, time_variants
from hpctrain.comm.world import World


def test_every_second_round_is_mirrored(world: World) -> None:
    order: list[str] = []

    def step_of(name: str, first: float) -> TimedVariant:
        losses = count(first)

        def step() -> float:
            order.append(name)
            return float(next(losses))

        return TimedVariant(name, step, 8.0, lambda: {"forward": 2.0})

    first, second = time_variants(
        world.single_rank_world(), [step_of("a", 1.0), step_of("b", 7.0)], steps=2, rounds=3
    )
    assert "".join(order) == "ab" + "aabb" + "bbaa" + "aabb"
    assert first.losses == [1, 2, 3, 4, 5, 6, 7]
    assert second.losses[-1] == 13
    assert len(first.tokens_per_s) == 3
    assert len(first.seconds) == 6
    assert min(first.tokens_per_s) > 0
    assert first.phases == {"forward": 1.0}  # 2 in each of three rounds of two steps


@pytest.mark.mpi(min_size=2, max_size=2)
def test_losses_are_those_of_ranks_that_have_any(world: World) -> None:
    last = TimedVariant("last", lambda: 3.0 if world.rank == 1 else None, 4.0)
    each = TimedVariant("each", lambda: 1.0 + world.rank, 4.0)
    assert [row.losses for row in time_variants(world, [last, each], 1, 1)] == [[3.0, 3.0], [1.5, 1.5]]
