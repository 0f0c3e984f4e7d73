"""The timeline: when this rank did what, for the newest steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

SCHEDULE, EVALUATION, PHASES = "schedule", "evaluation", "phases"
"""Rows that are no group of the mesh: actions in training and in evaluation, and the ledger's phases."""


@dataclass(slots=True)
class TimelineSpan:
    """Something with a start and an end, in seconds of this rank's `perf_counter`.

    `row` is the name of a group for communication, else one of the rows above. A started operation lasts
    until this rank saw that it was complete; `inside` are the seconds of it that the rank spent in the
    calls themselves, starting, testing and waiting.
    """

    row: str
    name: str
    start: float
    end: float
    bytes: int = 0
    inside: float = 0.0


@dataclass(slots=True)
class StepSpans:
    """What was recorded from one step's start to the next's; `dropped` counts what was too many."""

    step: int
    spans: list[TimelineSpan] = field(default_factory=list)
    dropped: int = 0


class Timeline:
    """Records the spans of the newest `steps` steps: of each all actions in training, and `most` in all.

    The times are the host's: on a GPU, when work was handed over, not when it ran. Nothing is recorded
    before the first `begin`, and between `pause` and the next `begin`.
    """

    def __init__(self, steps: int, most: int) -> None:
        assert steps > 0
        self.most = most
        self.steps: deque[StepSpans] = deque(maxlen=steps)
        self._current: StepSpans | None = None

    def begin(self, step: int) -> None:
        """All that follows belongs to `step`; the oldest step beyond the number kept is forgotten."""
        self._current = StepSpans(step)
        self.steps.append(self._current)

    def pause(self) -> None:
        """Record nothing until the next `begin`."""
        self._current = None

    def record(self, row: str, name: str, start: float, end: float, bytes: int = 0) -> TimelineSpan | None:  # noqa: A002
        """Add a span; itself, for a later end to be written into, or None where it is not kept."""
        current = self._current
        if current is None:
            return None
        if len(current.spans) >= self.most and row != SCHEDULE:
            current.dropped += 1
            return None
        span = TimelineSpan(row, name, start, end, bytes, end - start)
        current.spans.append(span)
        return span

    def action(self, name: str, start: float, training: bool) -> None:
        """Add an action of a schedule, which ends now."""
        self.record(SCHEDULE if training else EVALUATION, name, start, perf_counter())

    def spans(self) -> Iterator[tuple[int, TimelineSpan]]:
        """All spans with their steps."""
        return ((step.step, span) for step in self.steps for span in step.spans)

    @property
    def dropped(self) -> int:
        """Spans of the steps kept that were too many."""
        return sum(step.dropped for step in self.steps)


def lanes(spans: list[TimelineSpan]) -> list[int]:
    """For each span of a row, a lane in which it overlaps no other: 0 while there is only one at a time."""
    order = sorted(range(len(spans)), key=lambda index: (spans[index].start, spans[index].end))
    free: list[float] = []  # when the last span of each lane ends
    lane_of = [0] * len(spans)
    for index in order:
        span = spans[index]
        lane = next((lane for lane, end in enumerate(free) if end <= span.start), len(free))
        if lane == len(free):
            free.append(span.end)
        free[lane] = span.end
        lane_of[index] = lane
    return lane_of
