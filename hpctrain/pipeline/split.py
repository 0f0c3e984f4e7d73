"""Which blocks each part of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace, nsmallest
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

from hpctrain.model.part import LayerRange
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
    """As `split_over`, where every stage takes as long for a layer."""
    return split_over([times] * schedule.stage_count, schedule)


def split_over(times: Sequence[Sequence[float]], schedule: Schedule) -> list[int]:
    """Blocks of each part so that the longest stage, all its chunks together, is as short as can be.

    `times` are those of every layer on each stage: what the first part does besides its blocks (it embeds),
    all blocks, and what the last part does besides (it predicts). Among all such placements, one whose
    longest part is shortest; the even one where it is as good. Every part has a block at least, but for these
    two.

    Exact where blocks are all alike on a stage, and with one chunk; see `_of_unlike` for others.
    """
    known = list({id(each): each for each in times}.values())
    blocks = len(times[0]) - 2
    assert blocks >= sum(fewest_blocks(schedule.parts)), (blocks, schedule.parts)
    assert len(times) == schedule.stage_count and min(map(min, known)) >= 0, times
    alike = all(len(set(each[1:-1])) == 1 for each in known)
    split = (_of_alike if alike else _of_unlike)(times, schedule)
    even = even_split(blocks, schedule.parts)
    both = zip(_longest(times, even, schedule), _longest(times, split, schedule), strict=True)
    return even if all(one <= other * (1 + _ROUNDING) for one, other in both) else split


def _longest(
    times: Sequence[Sequence[float]], counts: Sequence[int], schedule: Schedule
) -> tuple[float, float]:
    """Of the longest stage, and of the longest part."""
    stages: list[float] = [0] * schedule.stage_count
    longest = 0.0
    for part, layers in enumerate(cut(range(len(times[0])), counts)):
        stage = schedule.home(part)[0]
        seconds = sum(times[stage][layer] for layer in layers)
        stages[stage] += seconds
        longest = max(longest, seconds)
    return max(stages), longest


def _of_alike(times: Sequence[Sequence[float]], schedule: Schedule) -> list[int]:
    """Stages take blocks one by one, each time the one that is then the shortest; so do the parts, up to the
    blocks that their stage has room for. With blocks all alike no other choice is shorter.
    """
    split = fewest_blocks(schedule.parts)
    stage_of = [schedule.home(part)[0] for part in range(schedule.parts)]
    block = [of_stage[1] for of_stage in times]
    parts = [many * block[stage] for many, stage in zip(split, stage_of, strict=True)]
    parts[0] += times[stage_of[0]][0]
    parts[-1] += times[stage_of[-1]][-1]
    stages = [0.0] * schedule.stage_count
    for part, stage in enumerate(stage_of):
        stages[stage] += parts[part]
    limit = max(stages)
    with_one_more = [(stages[stage] + block[stage], stage) for stage in range(schedule.stage_count)]
    heapify(with_one_more)
    blocks_left = range(len(times[0]) - 2 - sum(split))
    for _ in blocks_left:
        seconds, stage = with_one_more[0]
        limit = max(limit, seconds)
        heapreplace(with_one_more, (seconds + block[stage], stage))
    limit *= 1 + _ROUNDING
    shortest = [(parts[part] + block[stage], parts[part], part) for part, stage in enumerate(stage_of)]
    heapify(shortest)
    for _ in blocks_left:
        while stages[stage_of[shortest[0][-1]]] + block[stage_of[shortest[0][-1]]] > limit:
            heappop(shortest)  # its stage has no room, and will have none
        seconds, _, part = shortest[0]
        stage = stage_of[part]
        split[part] += 1
        stages[stage] += block[stage]
        heapreplace(shortest, (seconds + block[stage], seconds, part))
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


def _of_unlike(times: Sequence[Sequence[float]], schedule: Schedule) -> list[int]:
    """Part by part: of all ways to place so many blocks that leave the open stages alike, the best one; of
    these the `_MOST_WAYS` best, and where there never are more, none has a shorter longest stage.
    """
    parts, blocks, fewest = schedule.parts, len(times[0]) - 2, fewest_blocks(schedule.parts)
    stage_of = [schedule.home(part)[0] for part in range(parts)]
    # Whole numbers, so that sums are alike in any order.
    known = {id(each): each for each in times}
    most_seconds = max(map(max, known.values()))
    units = {key: [round(seconds / most_seconds * _UNITS) for seconds in each] for key, each in known.items()}
    layers = [units[id(each)] for each in times]
    even = even_split(blocks, parts)
    limit = _longest(layers, even, schedule)[0]
    # With so many blocks, and what comes before them: on each stage, and where each layer is quickest.
    sums = {key: list(accumulate(each)) for key, each in units.items()}
    until = [sums[id(each)] for each in times]
    least = list(accumulate(map(min, zip(*units.values(), strict=True))))
    mean = least[-1] // parts
    ways = {(0, (0,) * schedule.stage_count): _Way(0, 0, 0, ())}
    for part, stage in enumerate(stage_of):
        following: dict[tuple[int, tuple[int, ...]], _Way] = {}
        later = set(stage_of[part + 1 :])
        for (placed, loads), way in ways.items():
            before = until[stage][placed] if part else 0
            most = blocks - sum(fewest[part + 1 :])
            for end in range(placed + fewest[part] if later else blocks, most + 1):
                passed = end if part < parts - 1 else blocks + 1
                own = until[stage][passed] - before
                load = loads[stage] + own
                if load > limit:
                    break
                left = (*loads[:stage], load if stage in later else 0, *loads[stage + 1 :])
                rest = least[-1] - least[passed]
                stage_bound = max(way.stage, load, (rest + sum(left)) // max(1, len(later)))
                if stage_bound <= limit:
                    part_bound = max(way.part, own, rest // max(1, parts - part - 1))
                    uneven = way.uneven + (own - mean) ** 2
                    new = _Way(stage_bound, part_bound, uneven, (*way.split, end - placed))
                    following[end, left] = min(new, following.get((end, left), new))
        ways = dict(nsmallest(_MOST_WAYS, following.items(), key=itemgetter(1)))
    return list(min(ways.values()).split) if ways else even


def spans_of(schedule: Schedule, counts: Sequence[int], stage: int) -> list[LayerRange]:
    """The parts of one stage, by chunk; `counts` are the blocks of each part of the model, in order."""
    assert len(counts) == schedule.parts, (counts, schedule.parts)
    ends = list(accumulate(counts))
    last = schedule.parts - 1
    stages = sorted({schedule.home(0)[0], schedule.home(last)[0]})
    spans = []
    for chunk in range(schedule.chunks):
        part = schedule.part(stage, chunk)
        tied = stages.index(stage) if part in {0, last} else 0
        spans.append(
            LayerRange(ends[part] - counts[part], ends[part], part == 0, part == last, tied, len(stages))
        )
    return spans
