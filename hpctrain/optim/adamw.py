"""AdamW (arXiv 1711.05101), by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch.optim.adamw import adamw

from hpctrain.optim.optimizer import ElementBatch, by_treatment
from hpctrain.sharding.state import MASTER

_PIECE = 1 << 20
"""Elements that are updated at a time where no kernel of torch's does it, which takes memory for each."""


@dataclass(frozen=True)
class AdamW:
    """Weight decay of decayed elements only. Its kernel and not torch's class: that imports torch's compiler,
    which takes a second and memory on every rank.

    After `given_after` updates, if any, gradients come as their running mean: the square's stays as it is
    (1-bit Adam, arXiv 2102.02888), and what has never had a gradient by then stays, too.
    """

    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    given_after: int | None = None

    names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update in place, all that is treated alike in one call."""
        if self.given_after is not None and parts and parts[0].updates.item() >= self.given_after:
            for part in parts:
                self._follow(part, learning_rate, gradient_divisor, 1 - self.betas[1] ** self.given_after)
            return
        for (decayed, factor, _), alike in by_treatment(parts).items():
            device = alike[0].gradients.device
            adamw(
                [part.state[MASTER] for part in alike],
                [part.gradients for part in alike],
                [part.state["exp_avg"] for part in alike],
                [part.state["exp_avg_sq"] for part in alike],
                [],
                [part.updates for part in alike],
                fused=True,
                # The kernel divides by it while it reads: no pass over the gradients is added.
                grad_scale=torch.full((), gradient_divisor, device=device),
                found_inf=torch.zeros((), device=device),
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=learning_rate * factor,
                weight_decay=self.weight_decay / factor if decayed else 0.0,
                eps=self.epsilon,
                maximize=False,
            )

    def _follow(self, part: ElementBatch, learning_rate: float, divisor: float, grown: float) -> None:
        """Update with the mean that is given, and a square's mean that has `grown` to that share."""
        weights, mean, square = part.state[MASTER], part.state["exp_avg"], part.state["exp_avg_sq"]
        begun = 1 - self.betas[0] ** part.updates.add_(1)
        mean.copy_(part.gradients.div_(divisor))
        if part.treatment.decayed:
            weights.mul_(1 - learning_rate * self.weight_decay)
        for first in range(0, weights.numel(), _PIECE):
            piece = slice(first, first + _PIECE)
            size = (square[piece] / grown).sqrt_().add_(self.epsilon).mul_(begun)
            size.masked_fill_(square[piece] == 0, inf)
            weights[piece].addcdiv_(mean[piece], size, value=-learning_rate * part.treatment.rate)
