"""Lower bounds of the time of a pipeline schedule, which is not generated.

A stage begins when the first micro-batch has passed through the stages before it. After its work and its last
input gradient, the stages before it still have to do theirs. If all times are equal and messages take no
time, 1F1B and interleaved schedules reach the bound: a bubble of (p - 1) (F + B), divided by the number of
chunks (Narayanan and others, arXiv 2104.04473).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from hpctrain.deck.schedules import SCHEDULE_NAMES, V_SHAPED
from hpctrain.pipeline.simulate import PartTimes
from hpctrain.pipeline.v_bound import minimum_cost
from hpctrain.pipeline.v_schedule import LIMITS


class PartSeconds(NamedTuple):
    """Seconds of one micro-batch in a part of the model.

    Attributes:
        forward: Seconds of the forward pass.
        input_gradient: Seconds of the input gradients.
        weight_gradient: Seconds of the weight gradients.
    """

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def backward(self) -> float:
        """Seconds of both gradients."""
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> float:
        """Seconds of all passes."""
        return sum(self)


KNOWN = frozenset({"1f1b", "interleaved", "zb-h1", "zb-h2", "dualpipe-v"})
"""Schedules whose order of actions has a closed form."""

SPLITTING = frozenset({"zb-h1", "zb-h2"})
"""Those of them that defer weight gradients, each by a fixed number of micro-batches on a stage."""

_LAGS: Mapping[str, int] = {"zb-h1": 1, "zb-h2": 2}


def least_seconds(
    schedule: str,
    stages: int,
    micro_batches: int,
    parts: Sequence[PartSeconds],
    message: float,
) -> float:
    """Return a lower bound of the longest time of a stage from its first to its last action.

    For a schedule from a file, the bound is the work of a mean stage.

    Args:
        schedule: Name of the schedule.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        parts: Seconds of the parts of the model, in their order.
        message: Seconds of a message from a stage to the next one.
    """
    if schedule in LIMITS and stages > 1:
        messages, most = [message] * (stages - 1), 2 * LIMITS[schedule](stages)
        forward, input_gradient, weight_gradient = zip(*parts, strict=True)
        times = PartTimes(forward, input_gradient, weight_gradient, [*messages, 0.0, *messages])
        return minimum_cost(times, micro_batches, most)
    chunks = len(parts) // stages
    v_shaped = schedule in V_SHAPED
    work = [0.0] * stages
    for number, part in enumerate(parts):
        chunk, stage = divmod(number, stages)
        work[stages - 1 - stage if v_shaped and chunk % 2 else stage] += part.total
    if schedule not in SCHEDULE_NAMES:  # a schedule from a file may place the parts differently
        work = [sum(work) / stages]
    longest = max(work) * micro_batches
    if schedule not in KNOWN or stages == 1:
        return longest
    # Seconds until the first micro-batch reaches each stage, and from the last input gradient of each stage
    # to that of the first stage.
    before = [0.0, *accumulate(part.forward + message for part in parts[: stages - 1])]
    return_seconds = [
        part.input_gradient + message + (0.0 if schedule in SPLITTING or v_shaped else part.weight_gradient)
        for part in parts[: stages - 1]
    ]
    after_ = [0.0, *accumulate(return_seconds)]
    for stage in range(stages):
        own = micro_batches * work[stage]
        if schedule in SPLITTING:
            # Weight gradients that are computed after the last input gradient.
            left = min(micro_batches, _LAGS[schedule] * stage + 1)
            own -= left * parts[stage].weight_gradient
        elif v_shaped:
            own -= micro_batches * (
                parts[stage].weight_gradient + parts[2 * stages - 1 - stage].weight_gradient
            )
        longest = max(longest, before[stage] + own + after_[stage])
    if schedule == "1f1b" and message:
        longest = max(longest, _round_trips(stages, micro_batches, parts, message, before))
    assert chunks * stages == len(parts)
    return longest


def _round_trips(
    stages: int, micro_batches: int, parts: Sequence[PartSeconds], message: float, before: Sequence[float]
) -> float:
    """Return a lower bound for 1F1B with messages.

    After the warm-up, a stage starts a micro-batch only when an earlier one has returned from the last stage.
    """
    longest, trip = 0.0, 0.0
    for stage in reversed(range(stages)):
        trip += parts[stage].total + (2 * message if stage < stages - 1 else 0.0)
        in_flight = stages - stage
        if micro_batches > in_flight:
            longest = max(longest, before[stage] + ((micro_batches - 1) // in_flight + 1) * trip)
    return longest
