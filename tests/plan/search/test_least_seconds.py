"""What schedules take at the least: never more than their simulation says, and near it.

Tests of plan/search/least_seconds.py.
"""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hpctrain.deck.schedules import V_SHAPED
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.simulate import StageTimes, simulate
from hpctrain.plan.search.least_seconds import PartSeconds, least_seconds
from hpctrain.plan.search.search_space import ORDERED

PUBLISHED = PartSeconds(18.522, 18.086, 9.337)
"""Milliseconds of a stage of the 1.5B model, messages of 0.601 (Qi and others, arXiv 2401.10241, table)."""

ROUNDING = 1 + 1e-12


def simulated(
    name: str, stages: int, micro_batches: int, chunks: int, parts: list[PartSeconds], message: float
) -> float:
    """The cost of a schedule."""
    given = chunks if name == "interleaved" else None
    forward, inputs, weights = ([part[index] for part in parts] for index in range(3))
    return simulate(
        generate_schedule(name, stages, micro_batches, given), StageTimes(forward, inputs, weights, message)
    ).cost


def chunks_of(name: str, chunks: int) -> int:
    return chunks if name == "interleaved" else 2 if name in V_SHAPED else 1


seconds = some.floats(0, 4) | some.sampled_from([0.0, 1.0])


@settings(max_examples=150, deadline=None)
@given(
    name=some.sampled_from(ORDERED),
    stages=some.integers(2, 7),
    micro_batches=some.integers(1, 24),
    chunks=some.integers(2, 4),
    alike=some.booleans(),
    message=some.just(0.0) | some.floats(0, 2),
    data=some.data(),
)
def test_no_schedule_takes_less(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    alike: bool,
    message: float,
    data: some.DataObject,
) -> None:
    if name == "interleaved":
        micro_batches = stages * (1 + micro_batches % 4)
    chunks = chunks_of(name, chunks)
    part = some.builds(PartSeconds, seconds, seconds, seconds)
    count = stages * chunks
    parts = (
        [data.draw(part)] * count if alike else data.draw(some.lists(part, min_size=count, max_size=count))
    )
    cost = simulated(name, stages, micro_batches, chunks, parts, message)
    assert least_seconds(name, stages, micro_batches, parts, message) <= cost * ROUNDING


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
@pytest.mark.parametrize(("stages", "rounds", "chunks"), [(2, 1, 2), (4, 3, 2), (8, 2, 3), (3, 5, 4)])
def test_where_times_are_alike_and_messages_take_none_that_is_what_they_take(
    name: str, stages: int, rounds: int, chunks: int
) -> None:
    """(m + (p - 1) / v) (F + B), of v chunks (arXiv 2104.04473, section 2.2)."""
    chunks, micro_batches, part = chunks_of(name, chunks), rounds * stages, PartSeconds(1.0, 1.25, 0.75)
    parts = [part] * stages * chunks
    cost = simulated(name, stages, micro_batches, chunks, parts, 0.0)
    assert cost == pytest.approx((micro_batches * chunks + stages - 1) * part.total)
    assert least_seconds(name, stages, micro_batches, parts, 0.0) == pytest.approx(cost)


@pytest.mark.parametrize(("name", "share"), [("1f1b", 0.98), ("zb-h1", 0.85), ("zb-h2", 0.88)])
def test_the_published_model_takes_little_more(name: str, share: float) -> None:
    cost = simulated(name, 8, 24, 1, [PUBLISHED] * 8, 0.601)
    assert share * cost <= least_seconds(name, 8, 24, [PUBLISHED] * 8, 0.601) <= cost


@pytest.mark.parametrize("name", ORDERED)
def test_long_steps_take_little_more(name: str) -> None:
    shares = []
    for stages in (2, 4, 8):
        chunks = chunks_of(name, 3)
        parts = [PartSeconds(1.0, 1.1, 0.9)] * stages * chunks
        cost = simulated(name, stages, 8 * stages, chunks, parts, 0.0)
        shares.append(least_seconds(name, stages, 8 * stages, parts, 0.0) / cost)
    assert mean(shares) > 0.94


def test_one_stage_works_all_the_time() -> None:
    parts = [PartSeconds(1.0, 2.0, 3.0)]
    assert least_seconds("1f1b", 1, 7, parts, 5.0) == 42


def test_of_an_unknown_schedule_the_work_of_the_mean_stage_is_told() -> None:
    parts = [PartSeconds(1.0, 1.0, 1.0), PartSeconds(2.0, 1.0, 1.0)]
    assert least_seconds("of a file", 2, 5, parts, 9.0) == 17.5


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
@pytest.mark.parametrize("stages", [2, 4])
def test_parts_of_schedules_that_are_looked_for_lie_as_they_do(name: str, stages: int) -> None:
    """The first stage has the last part: heavy as the head is, no other stage has it."""
    random = Random(stages)
    for _ in range(5):
        parts = [PartSeconds(*(random.uniform(0.5, 2.0) for _ in range(3))) for _ in range(2 * stages)]
        parts[-1] = PartSeconds(9.0, 9.0, 9.0)
        parts[0] = PartSeconds(0.0, 0.0, 0.1)
        cost = simulated(name, stages, 8, 2, parts, 0.05)
        work = 8 * (parts[0].total + parts[-1].total)
        assert work <= least_seconds(name, stages, 8, parts, 0.05) * ROUNDING <= cost * ROUNDING**2
