"""Learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sqrt

from hpctrain.deck.learning_rate import Decay


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from 0 to `peak` over `warmup` steps, then decay to `floor` x peak.

    `decay_steps` counts from step 0 and includes the warm-up. "wsd" (arXiv 2404.06395) stays at the peak
    until the last `cooldown` of them, in which it falls in a line (arXiv 2405.18392). "inverse-sqrt" (arXiv
    1706.03762) ends at no step: the n-th one, from 1, has peak x sqrt(warmup / n), a warm-up of 0 counting
    as 1, until that is below the floor. With a `reference_batch` the rate is multiplied by the step's batch
    over it (linear scaling, arXiv 1706.02677).
    """

    peak: float
    warmup: int
    decay: Decay
    decay_steps: int
    floor: float
    reference_batch: int = 0
    cooldown: int = 0

    def at(self, step: int, batch: int) -> float:
        """The rate of step `step` (from 0) with `batch` sequences."""
        scale = batch / self.reference_batch if self.reference_batch else 1.0
        return self.peak * scale * self._factor(step)

    def _factor(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.decay == "constant":
            return 1.0
        if self.decay == "inverse-sqrt":
            return max(self.floor, sqrt(max(1, self.warmup) / (step + 1)))
        falling = self.cooldown if self.decay == "wsd" else self.decay_steps - self.warmup
        fallen = step - (self.decay_steps - falling)
        done = min(1.0, max(0.0, fallen / max(1, falling)))
        left = 0.5 * (1.0 + cos(pi * done)) if self.decay == "cosine" else 1.0 - done
        return self.floor + (1.0 - self.floor) * left
