"""Lion (arXiv 2302.06675): steps of one size, whose signs are those of a mean of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.sharding.state import MASTER

MEAN = "exp_avg"

_PIECE = 1 << 20
"""Elements that are updated at a time, since their signs take memory."""


@dataclass(frozen=True)
class Lion:
    """p -= rate (sign(b1 m + (1 - b1) g) + weight_decay p), then m = b2 m + (1 - b2) g, with `betas` b1, b2.

    Decay is of decayed elements only. What has no gradient, and never had one, stays where it is but for
    that.
    """

    betas: tuple[float, float]
    weight_decay: float

    names: ClassVar[tuple[str, ...]] = (MEAN,)

    @torch.no_grad()
    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements in place. The gradients are divided by `gradient_divisor` in place."""
        ahead, kept = self.betas
        for part in parts:
            part.updates.add_(1)
            rate = learning_rate * part.treatment.rate
            weights, mean = part.state[MASTER], part.state[MEAN]
            gradients = part.gradients.div_(gradient_divisor)
            if part.treatment.decayed and self.weight_decay:
                weights.mul_(1 - learning_rate * self.weight_decay)
            for first in range(0, weights.numel(), _PIECE):
                piece = slice(first, first + _PIECE)
                step = (mean[piece] * ahead).add_(gradients[piece], alpha=1 - ahead).sign_()
                weights[piece].sub_(step, alpha=rate)
                mean[piece].mul_(kept).add_(gradients[piece], alpha=1 - kept)
