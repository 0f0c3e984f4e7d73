"""The time limit of a run, and when it must stop to be over in time."""

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
BYTES_PER_SECOND = 200e6  # what one node surely writes of a checkpoint, before any was measured


@dataclass(frozen=True)
class TimeLimit:
    """When the run must be over, in seconds of `time.monotonic`; `name` says who wants it."""

    name: str
    end: float
    margin: float

    @classmethod
    def find(cls, deck: Deck, environment: Mapping[str, str], started: float) -> TimeLimit | None:
        """The earlier one of the deck's, counted from `started`, and the Slurm job's; None without any."""
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
    """How long things take in this run, in seconds; 0 what has not been done yet."""

    checkpoint: float  # the longest so far; before the first, what is expected
    evaluation: float = 0.0
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def after_step(self, done: StepDone) -> None:
        """Note how long it took."""
        self.steps.append(done.seconds)

    after_step_alone = after_step

    def reason_to_stop(
        self, limit: TimeLimit | None, now: float, evaluates: bool = False, writing: bool = False
    ) -> str:
        """Why no other step can be made before the limit; "" where one can.

        `evaluates`: an evaluation comes after that step. `writing`: a checkpoint is under way. One step is
        made in any case, so that no job is in vain: else a run whose limit is too short for it would be
        started again and again.
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
