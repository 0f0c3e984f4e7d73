"""Stochastic gradient descent with or without momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.sharding.state import MASTER

VELOCITY = "momentum"


@dataclass(frozen=True)
class SGD:
    """Update rule like torch's SGD without dampening.

    With gradient g, velocity v and parameter p:

        p = p (1 - rate weight_decay)
        v = momentum v + g
        p = p - rate (g + momentum v if nesterov else v)

    Without momentum, the master weights are the only state.

    Attributes:
        momentum: Decay of the velocity.
        nesterov: True for Nesterov momentum.
        weight_decay: Decoupled weight decay of the elements that have it.
        momentum_after: Number of updates after which the gradients include the momentum, because the ranks
            compress it (deep gradient compression, arXiv 1712.01887); None for never.
    """

    momentum: float
    nesterov: bool
    weight_decay: float
    momentum_after: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the optimizer state other than the master weights. It is initialized with zeros."""
        return (VELOCITY,) if self.momentum and self.momentum_after != 0 else ()

    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements in place. The gradients are divided by `gradient_divisor` in place."""
        for part in parts:
            part.updates.add_(1)
            rate = learning_rate * part.update_settings.learning_rate_factor
            weights, gradients = part.state[MASTER], part.gradients.div_(gradient_divisor)
            part.decay_weights(learning_rate * self.weight_decay)
            uses_velocity = self.momentum and (
                self.momentum_after is None or part.updates.item() <= self.momentum_after
            )
            if uses_velocity:
                velocity = part.state[VELOCITY].mul_(self.momentum).add_(gradients)
                weights.sub_(velocity, alpha=rate * (self.momentum if self.nesterov else 1.0))
            if self.nesterov or not uses_velocity:
                weights.sub_(gradients, alpha=rate)
