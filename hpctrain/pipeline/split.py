"""Which blocks each part of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hpctrain.model.transformer import Part
from hpctrain.pipeline.action import Schedule


def even_split(layers: int, parts: int) -> list[int]:
    """Blocks of each part, as equal as can be; where they are not, the middle parts get one more.

    The first part also embeds and the last one predicts, so they get the fewer blocks.
    """
    assert layers >= parts, (layers, parts)
    least, more = divmod(layers, parts)
    first = (parts - more + 1) // 2
    return [least + (first <= part < first + more) for part in range(parts)]


def parts_of(schedule: Schedule, counts: Sequence[int], stage: int) -> list[Part]:
    """The parts of one stage, by chunk; `counts` are the blocks of each part of the model, in order."""
    assert len(counts) == schedule.parts, (counts, schedule.parts)
    ends = list(accumulate(counts))
    last = schedule.parts - 1
    stages = sorted({schedule.home(0)[0], schedule.home(last)[0]})
    found = []
    for chunk in range(schedule.chunks):
        part = schedule.part(stage, chunk)
        tied = stages.index(stage) if part in {0, last} else 0
        found.append(Part(ends[part] - counts[part], ends[part], part == 0, part == last, tied, len(stages)))
    return found
