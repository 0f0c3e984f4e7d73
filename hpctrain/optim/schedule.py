"""Learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.deck.decays import DECAYS, DecaySpan


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from 0 to `peak` over `warmup` steps, then a decay to `floor` x peak.

    The forms of the decay are those of `DECAYS`, by name; its steps and bounds are told by `DecaySpan`. With
    a `reference_batch` the rate is multiplied by the step's batch over it (linear scaling, arXiv 1706.02677).
    """

    peak: float
    warmup: int
    decay: str
    decay_steps: int
    floor: float
    reference_batch: int = 0
    cooldown: int = 0

    def at(self, step: int, batch: int) -> float:
        """Return the rate of step `step` (from 0) with `batch` sequences."""
        scale = batch / self.reference_batch if self.reference_batch else 1.0
        return self.peak * scale * self._factor(step)

    def _factor(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        span = DecaySpan(self.warmup, self.decay_steps, self.cooldown, self.floor)
        return DECAYS[self.decay].rate(span, step)
