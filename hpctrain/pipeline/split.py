"""Assignment of the model's blocks to the parts of a pipeline.

The layers of a model are the embedding, the blocks, and the head (final norm and loss). The first part always
has the embedding and the last part the head. A split is the number of blocks of each part. The split whose
slowest stage is fastest is found by `costs/balanced_split.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from hpctrain.model.part import LayerRange
from hpctrain.pipeline.action import Schedule

Item = TypeVar("Item")


def minimum_blocks(parts: int) -> list[int]:
    """Return the least number of blocks of each part.

    It is 0 for the first and the last part, which have other layers, and 1 for all others, and for a single
    part.
    """
    return [0, *[1] * (parts - 2), 0] if parts > 1 else [1]


def even_split(layers: int, parts: int) -> list[int]:
    """Return a split with as equal numbers of blocks as possible, in which the middle parts have one more.

    The first part also embeds and the last one predicts, so they get fewer blocks. If there are fewer blocks
    than parts, the last part is the first to have none.
    """
    assert layers >= sum(minimum_blocks(parts)) and layers > 0, (layers, parts)
    if layers < parts:
        return [int(parts - 2 < layers), *[1] * (parts - 2), 0]
    least, extra = divmod(layers, parts)
    first = (parts - extra + 1) // 2
    return [least + (first <= part < first + extra) for part in range(parts)]


def split_layers(layers: Sequence[Item], counts: Sequence[int]) -> list[Sequence[Item]]:
    """Return the layers of each part, or any items that correspond to them.

    Args:
        layers: One item per layer; the first one is the embedding, the last one the head.
        counts: Number of blocks of each part.
    """
    ends = [1 + blocks for blocks in accumulate(counts)]
    return [layers[start:end] for start, end in pairwise([0, *ends[:-1], len(layers)])]


def layer_ranges(schedule: Schedule, counts: Sequence[int], stage: int) -> list[LayerRange]:
    """Return the layers of each part of one stage, by chunk.

    Args:
        schedule: Schedule with the stages and parts.
        counts: Number of blocks of each part of the model, in order.
        stage: Number of the stage.
    """
    assert len(counts) == schedule.parts, (counts, schedule.parts)
    ends = list(accumulate(counts))
    last = schedule.parts - 1
    stages = sorted({schedule.stage_and_chunk(0)[0], schedule.stage_and_chunk(last)[0]})
    spans = []
    for chunk in range(schedule.chunks):
        part = schedule.part(stage, chunk)
        tied = stages.index(stage) if part in {0, last} else 0
        spans.append(
            LayerRange(ends[part] - counts[part], ends[part], part == 0, part == last, tied, len(stages))
        )
    return spans
