"""Learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

Decay = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from 0 to `peak` over `warmup` steps, then decay to `floor` x peak.

    `decay_steps` counts from step 0 and includes the warm-up. With a `reference_batch` the rate is
    multiplied by the step's batch over it (linear scaling, arXiv 1706.02677).
    """

    peak: float
    warmup: int
    decay: Decay
    decay_steps: int
    floor: float
    reference_batch: int = 0

    def at(self, step: int, batch: int) -> float:
        """The rate of step `step` (from 0) with `batch` sequences."""
        scale = batch / self.reference_batch if self.reference_batch else 1.0
        return self.peak * scale * self._factor(step)

    def _factor(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, self.decay_steps - self.warmup))
        left = 0.5 * (1.0 + cos(pi * done)) if self.decay == "cosine" else 1.0 - done
        return self.floor + (1.0 - self.floor) * left
