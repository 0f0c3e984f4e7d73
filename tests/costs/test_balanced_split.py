"""Splits of blocks by their times, compared with all possible splits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from hpctrain.costs.balanced_split import balanced_split, split_by_stage_times
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.split import even_split

SCHEDULES = (
    *(generate_schedule("1f1b", stages, 4) for stages in (1, 2, 3, 4)),
    generate_schedule("interleaved", 2, 4, 2),
    generate_schedule("interleaved", 2, 4, 3),
    generate_schedule("interleaved", 3, 3, 2),
    generate_schedule("dualpipe-v", 2, 4),
    generate_schedule("dualpipe-v", 3, 6),
)


def ways(layers: int, parts: int, is_first: bool = True) -> Iterator[tuple[int, ...]]:
    """Return all lists of `parts` numbers with a sum, positive except for the first and the last one."""
    if parts == 1:
        if layers or not is_first:
            yield (layers,)
        return
    for first in range(0 if is_first else 1, layers + 1):
        for others in ways(layers - first, parts - 1, False):
            yield (first, *others)


def parts_of(layers: int, schedule: Schedule) -> bool:
    """Return True if there are enough blocks for the parts."""
    return layers > 0 and layers >= schedule.parts - 2


def cost(counts: Sequence[int], times: Sequence[float], schedule: Schedule) -> tuple[float, float]:
    """Return the times of the slowest stage and the slowest part, from the times of all layers."""
    return cost_over(counts, [times] * schedule.stage_count, schedule)


def cost_over(
    counts: Sequence[int], times: Sequence[Sequence[float]], schedule: Schedule
) -> tuple[float, float]:
    """Return the same from the times of all layers on each stage."""
    parts, done, stages = [], 1, [0.0] * schedule.stage_count
    for part, count in enumerate(counts):
        own = times[schedule.stage_and_chunk(part)[0]]
        parts.append(sum(own[done : done + count]))
        done += count
    parts[0] += times[schedule.stage_and_chunk(0)[0]][0]
    parts[-1] += times[schedule.stage_and_chunk(schedule.parts - 1)[0]][-1]
    for part, seconds in enumerate(parts):
        stages[schedule.stage_and_chunk(part)[0]] += seconds
    return round(max(stages), 9), round(max(parts), 9)


def alike(layers: int, block: float, first: float, last: float) -> list[float]:
    return [first, *[block] * layers, last]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.parts}")
def test_no_other_split_is_faster(schedule: Schedule) -> None:
    generator = random.Random(schedule.parts)
    for layers in filter(partial(parts_of, schedule=schedule), range(schedule.parts - 2, schedule.parts + 4)):
        for _ in range(12):
            block = generator.uniform(0.5, 2.0)
            first, last = generator.choice([0.0, 0.3, 1.0, 2.7, 9.0]), generator.uniform(0.0, 7.0)
            times = alike(layers, block, first, last)
            counts = balanced_split(times, schedule)
            assert sum(counts) == layers and tuple(counts) in set(ways(layers, schedule.parts))
            best = min(cost(way, times, schedule) for way in ways(layers, schedule.parts))
            assert cost(counts, times, schedule) == best


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.parts}")
def test_no_other_split_has_a_faster_slowest_stage_for_different_blocks(schedule: Schedule) -> None:
    generator = random.Random(schedule.parts)
    for layers in filter(partial(parts_of, schedule=schedule), range(schedule.parts - 2, schedule.parts + 4)):
        for number in range(12):
            dense, expert = generator.uniform(0.5, 2.0), generator.uniform(2.0, 9.0)
            blocks = [
                # Every second one is another, the first ones are, any is, all differ.
                [expert if block % 2 else dense for block in range(layers)],
                [dense if block < 2 else expert for block in range(layers)],
                [generator.choice([dense, expert]) for _ in range(layers)],
                [generator.uniform(0.0, 5.0) for _ in range(layers)],
            ][number % 4]
            times = [generator.choice([0.0, 0.3, 2.7, 9.0]), *blocks, generator.uniform(0.0, 7.0)]
            counts = balanced_split(times, schedule)
            assert sum(counts) == layers and tuple(counts) in set(ways(layers, schedule.parts))
            best = min(cost(way, times, schedule) for way in ways(layers, schedule.parts))
            stage, part = cost(counts, times, schedule)
            assert stage == best[0]
            if schedule.chunks == 1:
                assert part == best[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.parts}")
def test_an_even_split_wins_ties(schedule: Schedule) -> None:
    for layers in range(schedule.parts, 20):
        even = even_split(layers, schedule.parts)
        for first, last in ((0.0, 0.0), (0.25, 0.25), (1.0, 2.0)):
            times = alike(layers, 1.0, first, last)
            least = min(cost(way, times, schedule) for way in ways(layers, schedule.parts))
            if cost(even, times, schedule) == least:
                assert balanced_split(times, schedule) == even
    assert balanced_split(alike(12, 0.0, 0.0, 0.0), schedule) == even_split(12, schedule.parts)


def test_stages_with_a_slow_embedding_or_head_get_fewer_blocks() -> None:
    two, four = generate_schedule("1f1b", 2, 4), generate_schedule("1f1b", 4, 4)
    assert balanced_split(alike(5, 1.0, 0.1, 0.9), two) == [3, 2]
    assert balanced_split(alike(5, 1.0, 0.9, 0.1), two) == [2, 3]
    assert balanced_split(alike(10, 1.0, 2.0, 5.0), four) == [2, 4, 4, 0]
    assert balanced_split(alike(11, 1.0, 2.0, 3.0), four) == [2, 4, 4, 1]
    assert balanced_split(alike(2, 1.0, 0.0, 0.1), generate_schedule("1f1b", 3, 4)) == [1, 1, 0]
    # The first stage of a V holds both ends.
    assert balanced_split(alike(12, 1.0, 1.0, 3.0), generate_schedule("dualpipe-v", 2, 4)) == [3, 4, 4, 1]


def test_blocks_outside_the_slowest_stage_are_split_evenly() -> None:
    assert balanced_split([0.0, 1.0, 1.0, 1.0, 1.1, 1.0, 1.0, 9.0], generate_schedule("1f1b", 3, 4)) == [
        3,
        3,
        0,
    ]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.parts}")
@pytest.mark.parametrize("form", ["alike", "kinds", "any"])
def test_no_other_split_is_faster_on_stages_of_different_speed(schedule: Schedule, form: str) -> None:
    """Cases: equal blocks on each stage; blocks of several kinds on faster and slower stages; any times."""
    generator = random.Random(schedule.parts)
    for layers in filter(partial(parts_of, schedule=schedule), range(schedule.parts - 2, schedule.parts + 4)):
        for _ in range(5):
            slower = [generator.choice([1.0, 2.0, generator.uniform(0.3, 3.0)]) for _ in schedule.stages]
            blocks = (
                [1.0] * layers if form == "alike" else [generator.uniform(0.2, 5.0) for _ in range(layers)]
            )
            one = [generator.choice([0.0, 0.3, 2.7, 9.0]), *blocks, generator.uniform(0.0, 7.0)]
            times = [[seconds * times for seconds in one] for times in slower]
            if form == "any":
                times = [[generator.uniform(0.0, 5.0) for _ in one] for _ in schedule.stages]
            counts = split_by_stage_times(times, schedule)
            assert sum(counts) == layers and tuple(counts) in set(ways(layers, schedule.parts))
            best = min(cost_over(way, times, schedule) for way in ways(layers, schedule.parts))
            stage, part = cost_over(counts, times, schedule)
            assert stage == best[0]
            if schedule.chunks == 1 or form == "alike":
                assert part == best[1]


def test_stages_that_are_twice_as_fast_get_twice_the_blocks() -> None:
    slow, fast = alike(12, 2.0, 0.0, 0.0), alike(12, 1.0, 0.0, 0.0)
    assert split_by_stage_times([slow, slow, fast, fast], generate_schedule("1f1b", 4, 4)) == [2, 2, 4, 4]
    assert split_by_stage_times([fast, slow], generate_schedule("interleaved", 2, 4, 2)) == [4, 2, 4, 2]
    assert split_by_stage_times([fast, slow], generate_schedule("dualpipe-v", 2, 4)) == [4, 2, 2, 4]
    unlike = [0.0, *[1.0, 1.5] * 6, 0.0]
    assert split_by_stage_times([[2 * each for each in unlike], unlike], generate_schedule("1f1b", 2, 4)) == [
        4,
        8,
    ]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.parts}")
def test_stages_of_equal_speed_are_split_as_by_one_time(schedule: Schedule) -> None:
    generator = random.Random(schedule.parts)
    for other in (1.0, 2.0):
        times = [generator.uniform(0, 9), *[1.0, other] * 6, generator.uniform(0, 9)]
        several = [list(times) for _ in schedule.stages]
        assert split_by_stage_times(several, schedule) == balanced_split(times, schedule)


@pytest.mark.parametrize("other", [1.0, 3.0], ids=["alike", "unlike"])
def test_many_layers_are_split_quickly(other: float) -> None:
    for schedule in (generate_schedule("1f1b", 64, 64), generate_schedule("interleaved", 8, 8, 4)):
        times = [3.0, *[1.0, other] * 64, 5.0]
        counts = balanced_split(times, schedule)
        assert sum(counts) == 128
        stage, part = cost(counts, times, schedule)
        assert stage <= sum(times) / schedule.stage_count + max(times)
        assert part <= sum(times) / schedule.parts + 2 * max(times)
    assert sum(balanced_split(alike(1000, 1.0, 3.0, 5.0), generate_schedule("1f1b", 64, 64))) == 1000


def test_a_good_split_is_found_among_more_than_the_search_keeps() -> None:
    """All stages take the mean of 18, and none can take less."""
    times, schedule = [3.0, *[1.0, 3.0] * 16, 5.0], generate_schedule("interleaved", 4, 4, 2)
    stage, _ = cost(balanced_split(times, schedule), times, schedule)
    assert stage == sum(times) / 4
