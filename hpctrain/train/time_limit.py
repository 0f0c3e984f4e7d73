"""Time limit of a run, and the decision to stop before it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.deck.schema import Deck
from hpctrain.train.hook import Hook, StepDone
from hpctrain.units import format_seconds

RECENT_STEPS = 20
MARGIN = 60.0
"""Longest default margin, in seconds."""
BYTES_PER_SECOND = 200e6
"""Lower bound of the rate at which a node writes a checkpoint, until one was measured."""


@dataclass(frozen=True)
class TimeLimit:
    """Time at which a run must be over.

    Attributes:
        name: Where the limit comes from.
        end: The time, in seconds of `time.monotonic`.
        margin: Seconds before it at which the run stops.
    """

    name: str
    end: float
    margin: float

    @classmethod
    def find(cls, deck: Deck, environment: Mapping[str, str], started: float) -> TimeLimit | None:
        """Return the earlier one of the deck's limit, counted from `started`, and the Slurm job's, if any."""
        limits: list[tuple[float, str]] = []
        if deck.run.time_limit is not None:
            limits.append((started + deck.run.time_limit, "run.time_limit"))
        job_end = environment.get("SLURM_JOB_END_TIME", "")
        if job_end.isdigit():
            limits.append((time.monotonic() + int(job_end) - time.time(), "the Slurm job's time limit"))
        if not limits:
            return None
        end, name = min(limits)
        margin = deck.run.time_margin
        return cls(name, end, max(0.0, min(MARGIN, (end - started) / 10)) if margin is None else margin)


@dataclass
class Pace(Hook):
    """Hook that records how long steps take, to decide whether another one fits into the time limit.

    Attributes:
        checkpoint: Seconds of the slowest checkpoint so far, or the expected seconds before the first one.
        evaluation: Seconds of the last evaluation; 0 before the first one.
        steps: Seconds of the last steps.
    """

    checkpoint: float
    evaluation: float = 0.0
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def after_step(self, done: StepDone) -> None:
        """Record the seconds of the step."""
        self.steps.append(done.seconds)

    after_step_alone = after_step

    def reason_to_stop(
        self, limit: TimeLimit | None, now: float, evaluates: bool = False, writing: bool = False
    ) -> str:
        """Return why the time does not suffice for another step and a checkpoint; "" if it does.

        At least one step is made in any case. Otherwise a job with too short a limit would be started again
        and again without progress.

        Args:
            limit: The time limit, if any.
            now: Present time, in seconds of `time.monotonic`.
            evaluates: True if an evaluation follows the next step.
            writing: True if an unfinished checkpoint must be completed as well.
        """
        if limit is None or not self.steps:
            return ""
        step = max(self.steps) + (self.evaluation if evaluates else 0.0)
        checkpoint = self.checkpoint * (2 if writing else 1)
        needed = step + checkpoint + limit.margin
        left = limit.end - now
        if left >= needed:
            return ""
        written = f"{'two checkpoints' if writing else 'a checkpoint'} ({format_seconds(checkpoint)})"
        return (
            f"{format_seconds(max(0.0, left))} are left of {limit.name}, too little for a step "
            f"({format_seconds(step)}), {written} and a margin of {format_seconds(limit.margin)}"
        )
