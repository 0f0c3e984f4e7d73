"""What a pipeline's stages hold when they come to a backward, without their schedule being made.

Forwards of a chunk and its backwards go in the order of micro-batches, so numbers tell all.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from hpctrain.pipeline.v_schedule import LIMITS


class Moment(NamedTuple):
    """Before a backward: how many micro-batches of each chunk wait for theirs, and of how many only weight
    gradients are left; the chunk whose backward it is, and whether weight gradients come later: None where
    that is not known.
    """

    waiting: tuple[int, ...]
    deferred: tuple[int, ...]
    chunk: int
    split: bool | None


@lru_cache(maxsize=1 << 14)
def moments(schedule: str, stages: int, micro_batches: int, chunks: int, stage: int) -> tuple[Moment, ...]:
    """Of a stage of a schedule by name, those in which it holds most where its parts are alike; of one whose
    order is not known the first backward, by when one micro-batch has been in all its parts.
    """
    after, most = stages - stage, micro_batches
    if stages == 1:
        return (Moment((1,), (0,), 0, False),)
    if schedule == "1f1b":
        return (Moment((min(most, after),), (0,), 0, False),)
    if schedule == "gpipe":
        return (Moment((most,), (0,), 0, False),)
    if schedule in {"zb-h1", "zb-h2"}:
        warm_up, lag = (after, stage) if schedule == "zb-h1" else (2 * after - 1, 2 * stage)
        later = sorted({0, max(0, min(lag, most - warm_up)), min(lag, most - 1)})
        return tuple(Moment((min(most, warm_up + passed) - passed,), (passed,), 0, True) for passed in later)
    if schedule == "interleaved":
        rounds, left = divmod(2 * (after - 1) + (chunks - 1) * stages + 1, stages * chunks)
        begun = (rounds * stages + min(stages, max(0, left - chunk * stages)) for chunk in range(chunks))
        waiting = tuple(min(most, each) for each in begun)
        return (Moment(waiting, (0,) * chunks, chunks - 1, False),)
    if schedule == "dualpipe-v":
        down = stages + after
        first = (min(most, down - (after > 1)), min(most, stage + 1))
        up = min(most, stages + 1) - min(most, after)
        found = Moment(first, (0, 0), 1, after > 1), Moment((min(most, down), up), (0, 0), 0, False)
        if most < 2 * stages:
            return found
        # At the end backwards of both chunks, in turn, put weight gradients off.
        return *found, Moment((after, 0), (stage // 2, stage - stage // 2), 0, True)
    return (Moment((1,) * chunks, (0,) * chunks, chunks - 1, None),)


Opened = Literal["none", "blocks", "all"]
"""Whose whole gradients are there at once for a while."""


def opened(schedule: str, stages: int, micro_batches: int) -> Opened:
    """Of which layers of any stage all gradients have begun in some moment, and none is final; where that is
    all, while a chunk goes forward or back.
    """
    if stages == 1:
        return "all" if micro_batches > 1 else "none"
    fewest = {"1f1b": 2, "zb-h1": stages + 1, "zb-h2": 2 * stages, "interleaved": 2 * stages}
    fewest["dualpipe-v"] = stages + 2
    # The last forward waits for gradients of weights, which go in the order in which they come.
    fewest |= {name: 2 * limit(stages) + 1 for name, limit in LIMITS.items()}
    if schedule in fewest and micro_batches >= fewest[schedule]:
        return "all"
    # Where a block's are one bucket, some of them are not put off, and some are.
    return "blocks" if schedule in {"zb-h1", "zb-h2"} else "none"
