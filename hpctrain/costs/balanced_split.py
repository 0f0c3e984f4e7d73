"""Split of blocks into the parts of a pipeline by costs: the slowest stage is as fast as possible.

Costs are seconds, or FLOPs, of each layer: the embedding, each block, and the head. A split is the number of
blocks of each part (`pipeline/split.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace, nsmallest
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.split import even_split, minimum_blocks, split_layers

_ROUNDING = 1e-9
_UNITS = 10**12
"""Number of integer units into which the time of the slowest layer is divided."""
_MAX_PARTIAL_SPLITS = 500
"""Number of partial splits that the dynamic programming continues."""


def balanced_split(times: Sequence[float], schedule: Schedule) -> list[int]:
    """Return the split of `split_by_stage_times` for stages that all take the same time for a layer.

    Args:
        times: Time of the embedding, of each block, and of the head.
        schedule: Schedule with the stages and parts.
    """
    return split_by_stage_times([times] * schedule.stage_count, schedule)


def split_by_stage_times(times: Sequence[Sequence[float]], schedule: Schedule) -> list[int]:
    """Return the split whose slowest stage, with all its chunks, is as fast as possible.

    Among all such splits it is one whose slowest part is fastest. If the even split is as good, it is that
    one. Every part has at least a block, except for the first and the last. The result is optimal if all
    blocks take equally long on a stage, and with one chunk; otherwise it is a heuristic of
    `_split_different_blocks`.

    Args:
        times: For each stage, the times of every layer on it: the embedding, each block, and the head.
        schedule: Schedule with the stages and parts.
    """
    known = list({id(each): each for each in times}.values())
    blocks = len(times[0]) - 2
    assert blocks >= sum(minimum_blocks(schedule.parts)), (blocks, schedule.parts)
    assert len(times) == schedule.stage_count and min(map(min, known)) >= 0, times
    are_equal = all(len(set(each[1:-1])) == 1 for each in known)
    split = (_split_equal_blocks if are_equal else _split_different_blocks)(times, schedule)
    even = even_split(blocks, schedule.parts)
    both = zip(_longest_times(times, even, schedule), _longest_times(times, split, schedule), strict=True)
    return even if all(one <= other * (1 + _ROUNDING) for one, other in both) else split


def _longest_times(
    times: Sequence[Sequence[float]], counts: Sequence[int], schedule: Schedule
) -> tuple[float, float]:
    """Return the time of the slowest stage, and the time of the slowest part."""
    stages: list[float] = [0] * schedule.stage_count
    longest = 0.0
    for part, layers in enumerate(split_layers(range(len(times[0])), counts)):
        stage = schedule.stage_and_chunk(part)[0]
        seconds = sum(times[stage][layer] for layer in layers)
        stages[stage] += seconds
        longest = max(longest, seconds)
    return max(stages), longest


def _split_equal_blocks(times: Sequence[Sequence[float]], schedule: Schedule) -> list[int]:
    """Return the best split if all blocks take equally long on a stage.

    Blocks are given to stages one by one, each time to the stage that would then be fastest. Then parts take
    blocks in the same way, up to the number of their stage. With equal blocks no other choice is faster.
    """
    split = minimum_blocks(schedule.parts)
    stage_of = [schedule.stage_and_chunk(part)[0] for part in range(schedule.parts)]
    block = [of_stage[1] for of_stage in times]
    parts = [count * block[stage] for count, stage in zip(split, stage_of, strict=True)]
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
            heappop(shortest)  # its stage is full
        seconds, _, part = shortest[0]
        stage = stage_of[part]
        split[part] += 1
        stages[stage] += block[stage]
        heapreplace(shortest, (seconds + block[stage], seconds, part))
    return split


class _PartialSplit(NamedTuple):
    """Split of the first parts. The better one of two compares as smaller.

    Attributes:
        stage: Lower bound for the time of the slowest stage.
        part: Lower bound for the time of the slowest part.
        uneven: Sum of squared deviations of the parts' times from the mean.
        split: Blocks of each of the first parts.
    """

    stage: int
    part: int
    uneven: int
    split: tuple[int, ...]


def _split_different_blocks(times: Sequence[Sequence[float]], schedule: Schedule) -> list[int]:
    """Return a good split if blocks take different times, by dynamic programming over the parts.

    Of all partial splits with the same number of blocks and the same loads of stages that get further parts,
    only the best one is continued. Of these, only the best `_MAX_PARTIAL_SPLITS` are kept. If there are never
    more, the result is optimal.
    """
    parts, blocks, fewest = schedule.parts, len(times[0]) - 2, minimum_blocks(schedule.parts)
    stage_of = [schedule.stage_and_chunk(part)[0] for part in range(parts)]
    # Integers, so that sums do not depend on the order.
    known = {id(each): each for each in times}
    most_seconds = max(map(max, known.values()))
    units = {key: [round(seconds / most_seconds * _UNITS) for seconds in each] for key, each in known.items()}
    layers = [units[id(each)] for each in times]
    even = even_split(blocks, parts)
    limit = _longest_times(layers, even, schedule)[0]
    # Prefix sums of the layers' times: on each stage, and with each layer's fastest stage.
    sums = {key: list(accumulate(each)) for key, each in units.items()}
    until = [sums[id(each)] for each in times]
    least = list(accumulate(map(min, zip(*units.values(), strict=True))))
    mean = least[-1] // parts
    splits = {(0, (0,) * schedule.stage_count): _PartialSplit(0, 0, 0, ())}
    for part, stage in enumerate(stage_of):
        following: dict[tuple[int, tuple[int, ...]], _PartialSplit] = {}
        later = set(stage_of[part + 1 :])
        for (placed, loads), partial in splits.items():
            before = until[stage][placed] if part else 0
            most = blocks - sum(fewest[part + 1 :])
            for end in range(placed + fewest[part] if later else blocks, most + 1):
                end_layer = end if part < parts - 1 else blocks + 1
                seconds = until[stage][end_layer] - before
                load = loads[stage] + seconds
                if load > limit:
                    break
                later_loads = (*loads[:stage], load if stage in later else 0, *loads[stage + 1 :])
                rest = least[-1] - least[end_layer]
                stage_bound = max(partial.stage, load, (rest + sum(later_loads)) // max(1, len(later)))
                if stage_bound <= limit:
                    part_bound = max(partial.part, seconds, rest // max(1, parts - part - 1))
                    uneven = partial.uneven + (seconds - mean) ** 2
                    new = _PartialSplit(stage_bound, part_bound, uneven, (*partial.split, end - placed))
                    following[end, later_loads] = min(new, following.get((end, later_loads), new))
        splits = dict(nsmallest(_MAX_PARTIAL_SPLITS, following.items(), key=itemgetter(1)))
    return list(min(splits.values()).split) if splits else even
