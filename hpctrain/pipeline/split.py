"""Which blocks each part of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace, nsmallest
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

from hpctrain.model.part import Span
from hpctrain.pipeline.action import Schedule

Item = TypeVar("Item")

_ROUNDING = 1e-9
_UNITS = 10**12  # of the longest layer
_MOST_WAYS = 500


def fewest_blocks(parts: int) -> list[int]:
    """Of each part: the last one may predict alone and the first one embed alone, no other is without any."""
    return [0, *[1] * (parts - 2), 0] if parts > 1 else [1]


def even_split(layers: int, parts: int) -> list[int]:
    """Blocks of each part, as equal as can be; where they are not, the middle parts get one more.

    The first part also embeds and the last one predicts, so they get the fewer blocks; where there are fewer
    than parts, first the last one gets none.
    """
    assert layers >= sum(fewest_blocks(parts)) and layers > 0, (layers, parts)
    if layers < parts:
        return [int(parts - 2 < layers), *[1] * (parts - 2), 0]
    least, more = divmod(layers, parts)
    first = (parts - more + 1) // 2
    return [least + (first <= part < first + more) for part in range(parts)]


def cut(layers: Sequence[Item], counts: Sequence[int]) -> list[Sequence[Item]]:
    """What belongs to each layer of a model, by parts of so many blocks; the first layer is not a block but
    the first part's, the last one the last part's.
    """
    ends = [1 + blocks for blocks in accumulate(counts)]
    return [layers[start:end] for start, end in pairwise([0, *ends[:-1], len(layers)])]


def balanced_split(times: Sequence[float], schedule: Schedule) -> list[int]:
    """Blocks of each part so that the longest stage, all its chunks together, is as short as can be.

    `times` are those of every layer: what the first part does besides its blocks (it embeds), all blocks, and
    what the last part does besides (it predicts). Among all such placements, one whose longest part is
    shortest; the even one where it is as good. Every part has a block at least, but for these two.

    Exact with blocks all alike; see `_of_unlike` for others.
    """
    blocks = times[1:-1]
    assert len(blocks) >= sum(fewest_blocks(schedule.parts)) and min(times) >= 0, (times, schedule.parts)
    split = _of_alike(times, schedule) if len(set(blocks)) == 1 else _of_unlike(times, schedule)
    even = even_split(len(blocks), schedule.parts)
    both = zip(_longest(times, even, schedule), _longest(times, split, schedule), strict=True)
    return even if all(one <= other * (1 + _ROUNDING) for one, other in both) else split


def _longest(times: Sequence[float], counts: Sequence[int], schedule: Schedule) -> tuple[float, float]:
    """Of the longest stage, and of the longest part."""
    parts = [sum(part) for part in cut(times, counts)]
    stages: list[float] = [0] * schedule.stage_count
    for part, seconds in enumerate(parts):
        stages[schedule.home(part)[0]] += seconds
    return max(stages), max(parts)


def _of_alike(times: Sequence[float], schedule: Schedule) -> list[int]:
    """Stages take blocks one by one, each time the shortest one; then so do the parts, up to the
    blocks that their stage has room for. With blocks all alike no other choice is shorter.
    """
    block, split = times[1], fewest_blocks(schedule.parts)
    stage_of = [schedule.home(part)[0] for part in range(schedule.parts)]
    parts = [sum(part) for part in cut([times[0], *[block] * sum(split), times[-1]], split)]
    stages = [0.0] * schedule.stage_count
    for part, stage in enumerate(stage_of):
        stages[stage] += parts[part]
    shortest_first = stages.copy()
    heapify(shortest_first)
    blocks_left = range(len(times) - 2 - sum(split))
    for _ in blocks_left:
        heapreplace(shortest_first, shortest_first[0] + block)
    limit = max(shortest_first) * (1 + _ROUNDING)
    for _ in blocks_left:
        roomy = [part for part, stage in enumerate(stage_of) if stages[stage] + block <= limit]
        part = min(roomy, key=parts.__getitem__)
        split[part] += 1
        parts[part] += block
        stages[stage_of[part]] += block
    return split


class _Way(NamedTuple):
    """How the first parts are placed; the better of two is the smaller one.

    `stage` and `part` are what the longest ones will take at least, `uneven` tells how far the parts are from
    equal, `split` are their blocks.
    """

    stage: int
    part: int
    uneven: int
    split: tuple[int, ...]


def _of_unlike(times: Sequence[float], schedule: Schedule) -> list[int]:
    """Part by part: of all ways to place so many blocks that leave the open stages alike, the best one; of
    these the `_MOST_WAYS` best, and where there never are more, none has a shorter longest stage.
    """
    parts, blocks, fewest = schedule.parts, len(times) - 2, fewest_blocks(schedule.parts)
    stage_of = [schedule.home(part)[0] for part in range(parts)]
    # Whole numbers, so that sums are alike in any order.
    layers = [round(seconds / max(times) * _UNITS) for seconds in times]
    even = even_split(blocks, parts)
    limit = _longest(layers, even, schedule)[0]
    until, whole = list(accumulate(layers[:-1])), sum(layers)  # with so many blocks, and what comes before
    mean = whole // parts
    ways = {(0, (0,) * schedule.stage_count): _Way(0, 0, 0, ())}
    for part, stage in enumerate(stage_of):
        following: dict[tuple[int, tuple[int, ...]], _Way] = {}
        later = set(stage_of[part + 1 :])
        for (placed, loads), way in ways.items():
            before = until[placed] if part else 0
            most = blocks - sum(fewest[part + 1 :])
            for end in range(placed + fewest[part] if later else blocks, most + 1):
                done = until[end] if part < parts - 1 else whole
                own = done - before
                load = loads[stage] + own
                if load > limit:
                    break
                left = (*loads[:stage], load if stage in later else 0, *loads[stage + 1 :])
                rest = whole - done
                stage_bound = max(way.stage, load, (rest + sum(left)) // max(1, len(later)))
                if stage_bound <= limit:
                    part_bound = max(way.part, own, rest // max(1, parts - part - 1))
                    uneven = way.uneven + (own - mean) ** 2
                    new = _Way(stage_bound, part_bound, uneven, (*way.split, end - placed))
                    following[end, left] = min(new, following.get((end, left), new))
        ways = dict(nsmallest(_MOST_WAYS, following.items(), key=itemgetter(1)))
    return list(min(ways.values()).split) if ways else even


def spans_of(schedule: Schedule, counts: Sequence[int], stage: int) -> list[Span]:
    """The parts of one stage, by chunk; `counts` are the blocks of each part of the model, in order."""
    assert len(counts) == schedule.parts, (counts, schedule.parts)
    ends = list(accumulate(counts))
    last = schedule.parts - 1
    stages = sorted({schedule.home(0)[0], schedule.home(last)[0]})
    spans = []
    for chunk in range(schedule.chunks):
        part = schedule.part(stage, chunk)
        tied = stages.index(stage) if part in {0, last} else 0
        spans.append(Span(ends[part] - counts[part], ends[part], part == 0, part == last, tied, len(stages)))
    return spans
