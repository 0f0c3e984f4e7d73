"""Lion (arXiv 2302.06675): each element moves by the learning rate, in the sign of a mean of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.sharding.state import MASTER

MEAN = "exp_avg"

_PIECE = 1 << 20
"""Elements that are updated at a time, to bound the memory of their signs."""


@dataclass(frozen=True)
class Lion:
    """Update rule of signs.

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

    @torch.no_grad()
    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements in place. The gradients are divided by `gradient_divisor` in place."""
        first, second = self.betas
        for part in parts:
            part.updates.add_(1)
            rate = learning_rate * part.update_settings.rate
            weights, mean = part.state[MASTER], part.state[MEAN]
            gradients = part.gradients.div_(gradient_divisor)
            part.decay_weights(learning_rate * self.weight_decay)
            for start in range(0, weights.numel(), _PIECE):
                piece = slice(start, start + _PIECE)
                step = (mean[piece] * first).add_(gradients[piece], alpha=1 - first).sign_()
                weights[piece].sub_(step, alpha=rate)
                mean[piece].mul_(second).add_(gradients[piece], alpha=1 - second)
