"""What no V-shaped order undercuts that keeps to a limit of activations.

A stage does all its work. Besides, what it can do before the gradients of the first micro-batch are there
is bounded by how many it may hold, and so is what is left to do once the last one has been let in: in the
rest of these times it waits. And all activations that live in a step, each from its forward to its gradient,
have to live there as many at a time.
"""

from __future__ import annotations

from itertools import accumulate
from math import fsum

from hpctrain.pipeline.list_scheduling import GRADIENT_0, GRADIENT_1, PartTimes


def least_cost(times: PartTimes, micro_batches: int, limit: int) -> float:
    """Longest span of a stage at the least; each may hold activations of `limit` micro-batches of a chunk."""
    # When the first micro-batch can be in each part at the earliest, and its gradient.
    hops = zip(times.forward, times.communication, strict=False)
    forward = list(accumulate(map(fsum, hops), initial=0.0))
    hops = zip(times.input_gradient[:0:-1], times.communication[::-1], strict=True)
    gradient = list(accumulate(map(fsum, hops), initial=forward[-1] + times.forward[-1]))[::-1]
    longest = 0.0
    for stage in range(times.stages):
        up, begin = 2 * times.stages - 1 - stage, forward[stage]
        waits = forward[up] - begin, gradient[up] - begin, gradient[stage] - begin
        work = times.of_stage(stage)
        idle = _least_idle(work, waits, micro_batches, limit)
        # From a forward to the end of its gradient of inputs, of both chunks.
        lives = waits[2] + work[GRADIENT_0] + waits[1] - waits[0] + work[GRADIENT_1]
        longest = max(longest, micro_batches * fsum(work) + idle, micro_batches * lives / limit)
    return longest


def _least_idle(
    work: tuple[float, ...], waits: tuple[float, float, float], micro_batches: int, limit: int
) -> float:
    """Seconds in which a stage waits, by its `work` as of PartTimes; `waits` for the second forward of a
    micro-batch, and its second and first gradient, after the first forward.
    """
    forward_0, forward_1, gradient_0, gradient_1, weight_0, weight_1 = work
    second, gradient, last = waits
    held = min(micro_batches, limit)
    twice = min(micro_batches, limit // 2 if forward_1 > forward_0 else limit - held)
    once = min(micro_batches, limit - twice)
    chunk_1 = forward_1 + gradient_1 + weight_1
    first = max(
        second - held * forward_0,
        gradient - once * forward_0 - twice * forward_1,
        last - held * (forward_0 + chunk_1),
        0.0,
    )
    left = forward_0 + held * chunk_1 + (held - 1) * (gradient_0 + weight_0)
    final = max(0.0, last - left)
    # Only when gradients of the first one are there can there be room for the last one.
    return first + final if micro_batches > limit else max(first, final)
