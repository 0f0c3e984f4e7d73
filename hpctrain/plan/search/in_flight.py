"""Numbers of micro-batches in flight in the stages of a pipeline, without their schedules.

The forward passes of a chunk are in the order of micro-batches, and so are its backward passes, so numbers
are sufficient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from hpctrain.pipeline.v_schedule import LIMITS


class InFlight(NamedTuple):
    """Micro-batches in flight in a stage before a backward pass.

    Attributes:
        waiting: Number of micro-batches of each chunk between forward and backward pass.
        deferred: Number of micro-batches of each chunk whose weight gradients are deferred.
        chunk: Chunk of the backward pass.
        split: True if the backward pass defers weight gradients; None if unknown.
    """

    waiting: tuple[int, ...]
    deferred: tuple[int, ...]
    chunk: int
    split: bool | None


@lru_cache(maxsize=1 << 14)
def in_flight_peaks(
    schedule: str, stages: int, micro_batches: int, chunks: int, stage: int
) -> tuple[InFlight, ...]:
    """Return the states of a stage in which its memory may be largest, if its parts are equal.

    For schedules without a closed form, it is the state before the first backward pass, when all parts have
    seen at least one micro-batch.

    Args:
        schedule: Name of the schedule.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Number of chunks of each stage.
        stage: Number of the stage.
    """
    later_stages = stages - stage
    if stages == 1:
        return (InFlight((1,), (0,), 0, False),)
    if schedule == "1f1b":
        return (InFlight((min(micro_batches, later_stages),), (0,), 0, False),)
    if schedule == "gpipe":
        return (InFlight((micro_batches,), (0,), 0, False),)
    if schedule in {"zb-h1", "zb-h2"}:
        warm_up, lag = (later_stages, stage) if schedule == "zb-h1" else (2 * later_stages - 1, 2 * stage)
        later = sorted({0, max(0, min(lag, micro_batches - warm_up)), min(lag, micro_batches - 1)})
        return tuple(
            InFlight((min(micro_batches, warm_up + passed) - passed,), (passed,), 0, True) for passed in later
        )
    if schedule == "interleaved":
        rounds, left = divmod(2 * (later_stages - 1) + (chunks - 1) * stages + 1, stages * chunks)
        started = (rounds * stages + min(stages, max(0, left - chunk * stages)) for chunk in range(chunks))
        waiting = tuple(min(micro_batches, each) for each in started)
        return (InFlight(waiting, (0,) * chunks, chunks - 1, False),)
    if schedule == "dualpipe-v":
        down = stages + later_stages
        first = (min(micro_batches, down - (later_stages > 1)), min(micro_batches, stage + 1))
        up = min(micro_batches, stages + 1) - min(micro_batches, later_stages)
        peaks = (
            InFlight(first, (0, 0), 1, later_stages > 1),
            InFlight((min(micro_batches, down), up), (0, 0), 0, False),
        )
        if micro_batches < 2 * stages:
            return peaks
        # At the end, backward passes of both chunks alternate, and defer weight gradients.
        return *peaks, InFlight((later_stages, 0), (stage // 2, stage - stage // 2), 0, True)
    return (InFlight((1,) * chunks, (0,) * chunks, chunks - 1, None),)


CompleteGradients = Literal["none", "blocks", "all"]
"""Layers whose complete gradients exist at the same time."""


def complete_gradients(schedule: str, stages: int, micro_batches: int) -> CompleteGradients:
    """Return the layers of a stage whose gradients all exist at some time, while none of them is final.

    Args:
        schedule: Name of the schedule.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
    """
    if stages == 1:
        return "all" if micro_batches > 1 else "none"
    fewest = {"1f1b": 2, "zb-h1": stages + 1, "zb-h2": 2 * stages, "interleaved": 2 * stages}
    fewest["dualpipe-v"] = stages + 2
    # With a limit of memory, the last forward pass waits for weight gradients, which are computed in the
    # order in which they were deferred.
    fewest |= {name: 2 * limit(stages) + 1 for name, limit in LIMITS.items()}
    if schedule in fewest and micro_batches >= fewest[schedule]:
        return "all"
    # Weight gradients of linear layers are deferred, and other gradients in the bucket of a block are not.
    return "blocks" if schedule in {"zb-h1", "zb-h2"} else "none"
