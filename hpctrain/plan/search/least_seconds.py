"""What a schedule takes at the least, without making it: what its order has stages wait for in any case.

A stage begins when the first micro-batch has come through the stages before, does all its work, and when it
has given away the last gradient, the stages before still have theirs to do. Where times are alike and
messages take none, 1F1B and interleaving take no more: a bubble of (p - 1) (F + B), or of that over the
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
    """Of a micro-batch in a part of the model: forward, and the gradients of inputs and of weights."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> float:
        """All three."""
        return sum(self)


KNOWN = frozenset({"1f1b", "interleaved", "zb-h1", "zb-h2", "dualpipe-v"})
"""Schedules whose order is known without looking for it."""

SPLITTING = frozenset({"zb-h1", "zb-h2"})
"""Of these, those that put the gradients of weights off, each by so many micro-batches on a stage."""

_LAGS: Mapping[str, int] = {"zb-h1": 1, "zb-h2": 2}


def least_seconds(
    schedule: str,
    stages: int,
    micro_batches: int,
    parts: Sequence[PartSeconds],
    message: float,
) -> float:
    """The longest span of a stage at the least: from its first action to its last.

    `parts` are those of the model, in order, `message` the seconds from a stage to the next. Of a schedule of
    a file no more is told than the work of the mean stage.
    """
    if schedule in LIMITS and stages > 1:
        way, most = [message] * (stages - 1), 2 * LIMITS[schedule](stages)
        forward, input_gradient, weight_gradient = zip(*parts, strict=True)
        times = PartTimes(forward, input_gradient, weight_gradient, [*way, 0.0, *way])
        return minimum_cost(times, micro_batches, most)
    chunks = len(parts) // stages
    v_shaped = schedule in V_SHAPED
    work = [0.0] * stages
    for number, part in enumerate(parts):
        chunk, stage = divmod(number, stages)
        work[stages - 1 - stage if v_shaped and chunk % 2 else stage] += part.total
    if schedule not in SCHEDULE_NAMES:  # that of a file may lie otherwise
        work = [sum(work) / stages]
    longest = max(work) * micro_batches
    if schedule not in KNOWN or stages == 1:
        return longest
    # Through the first parts of all stages there, and back again.
    there = [0.0, *accumulate(part.forward + message for part in parts[: stages - 1])]
    back_of = [
        part.input_gradient + message + (0.0 if schedule in SPLITTING or v_shaped else part.weight_gradient)
        for part in parts[: stages - 1]
    ]
    back = [0.0, *accumulate(back_of)]
    for stage in range(stages):
        own = micro_batches * work[stage]
        if schedule in SPLITTING:
            # Gradients of weights that come after the last gradient of inputs.
            left = min(micro_batches, _LAGS[schedule] * stage + 1)
            own -= left * parts[stage].weight_gradient
        elif v_shaped:
            own -= micro_batches * (
                parts[stage].weight_gradient + parts[2 * stages - 1 - stage].weight_gradient
            )
        longest = max(longest, there[stage] + own + back[stage])
    if schedule == "1f1b" and message:
        longest = max(longest, _round_trips(stages, micro_batches, parts, message, there))
    assert chunks * stages == len(parts)
    return longest


def _round_trips(
    stages: int, micro_batches: int, parts: Sequence[PartSeconds], message: float, there: Sequence[float]
) -> float:
    """A stage takes a micro-batch after the warm-up only when one has come back from the last stage."""
    longest, trip = 0.0, 0.0
    for stage in reversed(range(stages)):
        trip += parts[stage].total + (2 * message if stage < stages - 1 else 0.0)
        under_way = stages - stage
        if micro_batches > under_way:
            longest = max(longest, there[stage] + ((micro_batches - 1) // under_way + 1) * trip)
    return longest
