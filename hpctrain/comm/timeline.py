"""Timeline of what this rank did in the last steps, and the offset between the clocks of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hpctrain.comm.group import Group

SCHEDULE, EVALUATION, PHASES = "schedule", "evaluation", "phases"
"""Rows other than groups: actions of the pipeline in training and in evaluation, and phases of the ledger."""

_EXCHANGES = 20
"""Messages that two ranks exchange to compare their clocks."""


@dataclass(slots=True)
class TimelineSpan:
    """One action, phase or call with its start and end, in seconds of this rank's `perf_counter`.

    Attributes:
        row: Name of the group for calls, otherwise one of SCHEDULE, EVALUATION and PHASES.
        name: Name of the action, phase or operation.
        start: Time of the start.
        end: Time of the end; for a started operation, when this rank saw that it was complete.
        bytes: Payload of a call.
        call_seconds: Part of the time that the rank spent in the call: starting, testing and waiting. For
            actions and phases, the whole time.
    """

    row: str
    name: str
    start: float
    end: float
    bytes: int = 0
    call_seconds: float = 0.0


@dataclass(slots=True)
class StepSpans:
    """Spans from the start of one step to the start of the next one.

    Attributes:
        step: Number of the step.
        spans: Recorded spans, in the order of their starts.
        dropped: Number of spans that were not recorded because there were too many.
    """

    step: int
    spans: list[TimelineSpan] = field(default_factory=list)
    dropped: int = 0


class Timeline:
    """Record of the spans of the last steps. All methods are local.

    Times are those of the host: on a GPU, when work was started, not when it ran. Nothing is recorded before
    the first `begin_step`, and between `pause` and the next `begin_step`.

    Args:
        steps: Number of steps that are kept.
        max_spans: Maximum number of spans of a step. Beyond it, only actions of training are recorded.
    """

    def __init__(self, steps: int, max_spans: int) -> None:
        assert steps > 0
        self.max_spans = max_spans
        self.steps: deque[StepSpans] = deque(maxlen=steps)
        self._current: StepSpans | None = None

    def begin_step(self, step: int) -> None:
        """Begin a step, to which all spans belong that are recorded from now on.

        The oldest step is dropped if more than the maximum number of steps would be kept.

        Args:
            step: Number of the step.
        """
        self._current = StepSpans(step)
        self.steps.append(self._current)

    def pause(self) -> None:
        """Record nothing until the next `begin_step`. What is recorded stays."""
        self._current = None

    def record(self, row: str, name: str, start: float, end: float, bytes: int = 0) -> TimelineSpan | None:  # noqa: A002
        """Add a span to the current step, and return it, so that the caller can set a later `end`.

        Args:
            row: Name of a group, or one of SCHEDULE, EVALUATION and PHASES.
            name: Name of the operation, action or phase.
            start: Time of the start, in seconds of `perf_counter`.
            end: Time of the end so far.
            bytes: Payload of a call.

        Returns:
            The span; None if it is not recorded, because there is no current step, or because the step
            already has the maximum number of spans (then it counts in `dropped`). Spans of SCHEDULE are
            recorded even then.
        """
        current = self._current
        if current is None:
            return None
        if len(current.spans) >= self.max_spans and row != SCHEDULE:
            current.dropped += 1
            return None
        span = TimelineSpan(row, name, start, end, bytes, end - start)
        current.spans.append(span)
        return span

    def record_action(self, name: str, start: float, training: bool) -> None:
        """Record an action of a pipeline schedule that ends now, under the conditions of `record`.

        Args:
            name: Name of the action.
            start: Time of its start, in seconds of `perf_counter`.
            training: True if it belongs to training, False if it belongs to evaluation.
        """
        self.record(SCHEDULE if training else EVALUATION, name, start, perf_counter())

    def spans(self) -> Iterator[tuple[int, TimelineSpan]]:
        """Return an iterator over (number of the step, span) for all kept spans, the first recorded first."""
        return ((step.step, span) for step in self.steps for span in step.spans)

    @property
    def dropped(self) -> int:
        """Number of spans of the kept steps that were not recorded because their step had too many."""
        return sum(step.dropped for step in self.steps)


def clock_offset(group: Group, node: int, clock: Callable[[], float] = perf_counter) -> float:
    """Return how far this rank's clock is ahead of the clock of the group's rank 0, in seconds.

    Collective; waits. All ranks of a node read the same clock and get the same value, which is 0.0 on the
    node of rank 0. The lowest rank of each other node exchanges messages with rank 0. Of several round trips
    the shortest counts, and rank 0 is assumed to have answered in its middle (Cristian 1989). The error is at
    most half of that round trip.

    Args:
        group: Ranks whose clocks are compared.
        node: Node of this rank.
        clock: Function that returns the time of this rank, in seconds.
    """
    nodes = group.all_gather_object(node)
    offset = 0.0
    for rank in sorted({nodes.index(other) for other in nodes} - {0}):
        if group.rank == 0:
            _answer(group, rank, clock)
        elif group.rank == rank:
            offset = _measure_offset(group, clock)
    return float(group.all_gather_object(offset)[nodes.index(node)])


def _measure_offset(group: Group, clock: Callable[[], float]) -> float:
    shortest, offset = float("inf"), 0.0
    time = torch.zeros(1, dtype=torch.float64)
    for _ in range(_EXCHANGES):
        start = clock()
        group.send(time, 0)
        group.recv(time, 0)
        end = clock()
        if end - start < shortest:
            shortest, offset = end - start, (start + end) / 2 - time.item()
    return offset


def _answer(group: Group, rank: int, clock: Callable[[], float]) -> None:
    time = torch.zeros(1, dtype=torch.float64)
    for _ in range(_EXCHANGES):
        group.recv(time, rank)
        time[0] = clock()
        group.send(time, rank)
