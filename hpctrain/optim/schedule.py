"""Learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.deck.decays import DECAYS, DecaySpan


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, then a decay.

    Attributes:
        peak: Largest learning rate, at the end of the warm-up.
        warmup: Steps of the warm-up from 0.
        decay: Name of the decay, a key of `DECAYS`.
        decay_steps: Step at which the decay ends.
        floor: Final learning rate as a fraction of `peak`.
        reference_batch: If it is not 0, the rate is multiplied by the batch of a step over this number
            (linear scaling, arXiv 1706.02677).
        cooldown: Steps of the final decay of decays that have one.
    """

    peak: float
    warmup: int
    decay: str
    decay_steps: int
    floor: float
    reference_batch: int = 0
    cooldown: int = 0

    def at(self, step: int, batch: int) -> float:
        """Return the learning rate of step `step` (from 0) with `batch` sequences."""
        scale = batch / self.reference_batch if self.reference_batch else 1.0
        return self.peak * scale * self._factor(step)

    def _factor(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        span = DecaySpan(self.warmup, self.decay_steps, self.cooldown, self.floor)
        return DECAYS[self.decay].rate(span, step)
