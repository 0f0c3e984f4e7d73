"""Stochastic gradient descent, with momentum or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.sharding.state import MASTER

VELOCITY = "momentum"


@dataclass(frozen=True)
class SGD:
    """v = momentum v + g; p -= rate (v, or g + momentum v with `nesterov`), as torch's SGD without dampening.

    After `given_after` updates, if any, gradients come with their momentum, as DGC's (arXiv 1712.01887).
    Weight decay is decoupled, p -= rate * weight_decay * p, as AdamW's, and of decayed elements only. Without
    momentum there is no state beside the weights.
    """

    momentum: float
    nesterov: bool
    weight_decay: float
    given_after: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the optimizer state other than the master weights. It is initialized with zeros."""
        return (VELOCITY,) if self.momentum and self.given_after != 0 else ()

    @torch.no_grad()
    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements in place. The gradients are divided by `gradient_divisor` in place."""
        for part in parts:
            part.updates.add_(1)
            rate = learning_rate * part.treatment.rate
            weights, gradients = part.state[MASTER], part.gradients.div_(gradient_divisor)
            if part.treatment.decayed and self.weight_decay:
                weights.mul_(1 - learning_rate * self.weight_decay)
            follows = self.momentum and (self.given_after is None or part.updates.item() <= self.given_after)
            if follows:
                velocity = part.state[VELOCITY].mul_(self.momentum).add_(gradients)
                weights.sub_(velocity, alpha=rate * (self.momentum if self.nesterov else 1.0))
            if self.nesterov or not follows:
                weights.sub_(gradients, alpha=rate)
