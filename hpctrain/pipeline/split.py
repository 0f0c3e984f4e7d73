"""Which blocks each part of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hpctrain.model.part import Span
from hpctrain.pipeline.action import Schedule

_ROUNDING = 1e-9


def even_split(layers: int, parts: int) -> list[int]:
    """Blocks of each part, as equal as can be; where they are not, the middle parts get one more.

    The first part also embeds and the last one predicts, so they get the fewer blocks.
    """
    assert layers >= parts, (layers, parts)
    least, more = divmod(layers, parts)
    first = (parts - more + 1) // 2
    return [least + (first <= part < first + more) for part in range(parts)]


def balanced_split(layers: int, block: float, first: float, last: float, schedule: Schedule) -> list[int]:
    """Blocks of each part so that the longest stage, all its chunks together, is as short as can be.

    `block`, `first` and `last` are the times of one block, of what the first part does besides (it embeds),
    and of what the last one does (it predicts). Among all such placements, one whose longest part is
    shortest; the even one where it is as good. Every part has a block at least.

    Exact: stages take blocks one by one, each time the one that will be shortest; then so do the parts, up
    to the blocks that their stage has room for. With blocks all alike no other choice is shorter.
    """
    parts = schedule.parts
    assert layers >= parts and min(block, first, last) >= 0, (layers, parts, block, first, last)
    stage_of = [schedule.home(part)[0] for part in range(parts)]
    fixed = [(part == 0) * first + (part == parts - 1) * last for part in range(parts)]
    fixed_of_stage = [0.0] * schedule.stage_count
    for part, stage in enumerate(stage_of):
        fixed_of_stage[stage] += fixed[part]
    count = [schedule.chunks] * schedule.stage_count
    for _ in range(layers - parts):
        shortest = min(
            range(len(count)), key=lambda stage: (count[stage] + 1) * block + fixed_of_stage[stage]
        )
        count[shortest] += 1

    def longest_stage(blocks: Sequence[int]) -> float:
        return max(blocks[stage] * block + fixed_of_stage[stage] for stage in range(len(blocks)))

    longest = longest_stage(count) * (1 + _ROUNDING)
    split, held = [1] * parts, [schedule.chunks] * schedule.stage_count

    for _ in range(layers - parts):
        roomy = [
            part
            for part, stage in enumerate(stage_of)
            if (held[stage] + 1) * block + fixed_of_stage[stage] <= longest
        ]
        shortest = min(roomy, key=lambda part: (split[part] + 1) * block + fixed[part])
        split[shortest] += 1
        held[stage_of[shortest]] += 1

    def longest_part(blocks: Sequence[int]) -> float:
        return max(number * block + extra for number, extra in zip(blocks, fixed, strict=True))

    even = even_split(layers, parts)
    of_stage = [
        sum(even[part] for part in range(parts) if stage_of[part] == stage) for stage in range(len(count))
    ]
    as_good = longest_stage(of_stage) <= longest
    as_good &= longest_part(even) <= longest_part(split) * (1 + _ROUNDING)
    return even if as_good else split


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
