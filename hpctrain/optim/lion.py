"""Lion (arXiv 2302.06675): each element moves by the learning rate, with the sign of averaged gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.sharding.state import MASTER

MEAN = "exp_avg"


@dataclass(frozen=True)
class Lion:
    """Update rule that moves all elements by the same amount, with the sign of an average of gradients.

    With gradient g, momentum m and parameter p:

        p = p - rate (sign(b1 m + (1 - b1) g) + weight_decay p)
        m = b2 m + (1 - b2) g

    Elements that never had a gradient only decay.

    Attributes:
        betas: Decays b1 and b2.
        weight_decay: Decoupled weight decay of the elements that have it.
    """

    betas: tuple[float, float]
    weight_decay: float

    names: ClassVar[tuple[str, ...]] = (MEAN,)

    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements in place. The gradients are divided by `gradient_divisor` in place."""
        first, second = self.betas
        for part in parts:
            part.updates.add_(1)
            rate = learning_rate * part.update_settings.learning_rate_factor
            part.gradients.div_(gradient_divisor)
            part.decay_weights(learning_rate * self.weight_decay)
            for piece in part.pieces():
                mean, gradients = piece.state[MEAN], piece.gradients
                step = (mean * first).add_(gradients, alpha=1 - first).sign_()
                piece.state[MASTER].sub_(step, alpha=rate)
                mean.mul_(second).add_(gradients, alpha=1 - second)
