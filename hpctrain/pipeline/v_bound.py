"""Lower bound for the cost of V-shaped schedules under a limit of activations.

A stage must do all its work. Before the first gradients arrive, the work that it can do is bounded by the
number of micro-batches that it may hold; so is the work that remains after the last micro-batch has started.
During the rest of these two times the stage is idle. Besides, the activations of all micro-batches, each from
its F to its I, must fit below the limit at any time.
"""

from __future__ import annotations

from itertools import accumulate
from math import fsum

from hpctrain.pipeline.list_scheduling import GRADIENT_0, GRADIENT_1
from hpctrain.pipeline.simulate import PartTimes


def minimum_cost(times: PartTimes, micro_batches: int, limit: int) -> float:
    """Return a lower bound for `Simulation.cost`, the longest time that a stage is active, of any schedule.

    Args:
        times: Times of all parts.
        micro_batches: Number of micro-batches.
        limit: Number of (chunk, micro-batch) pairs whose activations a stage may hold.
    """
    # Earliest arrival of the first micro-batch, and of its gradient, in each part.
    hops = zip(times.forward, times.communication, strict=False)
    forward = list(accumulate(map(fsum, hops), initial=0.0))
    hops = zip(times.input_gradient[:0:-1], times.communication[::-1], strict=True)
    gradient = list(accumulate(map(fsum, hops), initial=forward[-1] + times.forward[-1]))[::-1]
    longest = 0.0
    for stage in range(times.stages):
        second_part, begin = 2 * times.stages - 1 - stage, forward[stage]
        waits = forward[second_part] - begin, gradient[second_part] - begin, gradient[stage] - begin
        work = times.stage_durations(stage)
        idle = _minimum_idle(work, waits, micro_batches, limit)
        # Time from F to the end of I, of both chunks.
        lifetimes = waits[2] + work[GRADIENT_0] + waits[1] - waits[0] + work[GRADIENT_1]
        longest = max(longest, micro_batches * fsum(work) + idle, micro_batches * lifetimes / limit)
    return longest


def _minimum_idle(
    work: tuple[float, ...], waits: tuple[float, float, float], micro_batches: int, limit: int
) -> float:
    """Return a lower bound for the idle time of a stage.

    Args:
        work: Durations of the stage, as from `PartTimes.stage_durations`.
        waits: Earliest times of F of chunk 1, I of chunk 1 and I of chunk 0 of a micro-batch, after the start
            of its F of chunk 0.
        micro_batches: Number of micro-batches.
        limit: Number of (chunk, micro-batch) pairs whose activations a stage may hold.
    """
    forward_0, forward_1, gradient_0, gradient_1, weight_0, weight_1 = work
    second, gradient, last = waits
    live = min(micro_batches, limit)
    # Forward passes of each chunk that fit below the limit before the first gradient arrives.
    forwards_1 = min(micro_batches, limit // 2 if forward_1 > forward_0 else limit - live)
    forwards_0 = min(micro_batches, limit - forwards_1)
    chunk_1 = forward_1 + gradient_1 + weight_1
    first = max(
        second - live * forward_0,
        gradient - forwards_0 * forward_0 - forwards_1 * forward_1,
        last - live * (forward_0 + chunk_1),
        0.0,
    )
    remaining_work = forward_0 + live * chunk_1 + (live - 1) * (gradient_0 + weight_0)
    final = max(0.0, last - remaining_work)
    # The last micro-batch fits only after gradients of the first one have arrived.
    return first + final if micro_batches > limit else max(first, final)
