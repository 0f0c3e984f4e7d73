"""Where layers go: balanced by time, against every way there is."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.generate import generate
from hpctrain.pipeline.split import balanced_split, even_split

SCHEDULES = (
    *(generate("1f1b", stages, 4) for stages in (1, 2, 3, 4)),
    generate("interleaved", 2, 4, 2),
    generate("interleaved", 2, 4, 3),
    generate("interleaved", 3, 3, 2),
    generate("dualpipe-v", 2, 4),
    generate("dualpipe-v", 3, 6),
)


def ways(layers: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All lists of so many positive numbers with this sum."""
    if parts == 1:
        yield (layers,)
        return
    for first in range(1, layers - parts + 2):
        for others in ways(layers - first, parts - 1):
            yield (first, *others)


def cost(
    counts: Sequence[int], block: float, first: float, last: float, schedule: Schedule
) -> tuple[float, float]:
    """The longest stage, and the longest part."""
    parts = [count * block for count in counts]
    parts[0] += first
    parts[-1] += last
    stages = [0.0] * schedule.stage_count
    for part, seconds in enumerate(parts):
        stages[schedule.home(part)[0]] += seconds
    return round(max(stages), 9), round(max(parts), 9)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.parts}")
def test_no_other_way_is_shorter(schedule: Schedule) -> None:
    generator = random.Random(schedule.parts)
    for layers in range(schedule.parts, schedule.parts + 7):
        for _ in range(12):
            block = generator.uniform(0.5, 2.0)
            first, last = generator.choice([0.0, 0.3, 1.0, 2.7, 9.0]), generator.uniform(0.0, 7.0)
            counts = balanced_split(layers, block, first, last, schedule)
            assert sum(counts) == layers and min(counts) >= 1
            best = min(cost(way, block, first, last, schedule) for way in ways(layers, schedule.parts))
            assert cost(counts, block, first, last, schedule) == best


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.parts}")
def test_even_where_that_is_as_good(schedule: Schedule) -> None:
    for layers in range(schedule.parts, 20):
        even = even_split(layers, schedule.parts)
        for first, last in ((0.0, 0.0), (0.25, 0.25), (1.0, 2.0)):
            least = min(cost(way, 1.0, first, last, schedule) for way in ways(layers, schedule.parts))
            if cost(even, 1.0, first, last, schedule) == least:
                assert balanced_split(layers, 1.0, first, last, schedule) == even
    assert balanced_split(12, 0.0, 0.0, 0.0, schedule) == even_split(12, schedule.parts)


def test_ends_that_take_time_get_fewer_blocks() -> None:
    two, four = generate("1f1b", 2, 4), generate("1f1b", 4, 4)
    assert balanced_split(5, 1.0, 0.1, 0.9, two) == [3, 2]
    assert balanced_split(5, 1.0, 0.9, 0.1, two) == [2, 3]
    assert balanced_split(10, 1.0, 2.0, 5.0, four) == [2, 4, 3, 1]
    # The first stage of a V holds both ends.
    assert balanced_split(12, 1.0, 1.0, 3.0, generate("dualpipe-v", 2, 4)) == [3, 4, 4, 1]


def test_many_layers_take_no_time() -> None:
    counts = balanced_split(1000, 1.0, 3.0, 5.0, generate("1f1b", 64, 64))
    assert sum(counts) == 1000
