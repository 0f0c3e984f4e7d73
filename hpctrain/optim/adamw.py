"""AdamW (arXiv 1711.05101), computed by torch's fused kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch.optim.adamw import adamw

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.shards import UpdateSettings
from hpctrain.sharding.state import MASTER


@dataclass(frozen=True)
class AdamW:
    """Update rule with decoupled weight decay. Results have the bits of `torch.optim.AdamW`.

    It calls the fused kernel directly, because torch's class imports the compiler: a second and memory on
    every rank.

    Attributes:
        betas: Decays of the first and the second moment.
        epsilon: Number that is added to the root of the second moment.
        weight_decay: Decoupled weight decay of the elements that have it.
        momentum_after: Number of updates after which the gradients are the first moment itself, because the
            ranks reduce compressed momentum (1-bit Adam, arXiv 2102.02888); None for never. From then on the
            second moment stays as it is, and elements where it is zero are not updated.
    """

    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    momentum_after: int | None = None

    names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements in place, those with the same settings in one call of the kernel."""
        if self.momentum_after is not None and parts and parts[0].updates.item() >= self.momentum_after:
            correction = 1 - self.betas[1] ** self.momentum_after
            for part in parts:
                self._apply_momentum(part, learning_rate, gradient_divisor, correction)
            return
        groups: defaultdict[UpdateSettings, list[ElementBatch]] = defaultdict(list)
        for part in parts:
            groups[part.update_settings].append(part)
        for (decayed, factor, _), group in groups.items():
            device = group[0].gradients.device
            adamw(
                [part.state[MASTER] for part in group],
                [part.gradients for part in group],
                [part.state["exp_avg"] for part in group],
                [part.state["exp_avg_sq"] for part in group],
                [],
                [part.updates for part in group],
                fused=True,
                # The kernel divides the gradients by it while it reads them.
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

    def _apply_momentum(
        self, part: ElementBatch, learning_rate: float, divisor: float, second_correction: float
    ) -> None:
        """Update elements whose gradients already are the first moment, for 1-bit Adam."""
        first_correction = 1 - self.betas[0] ** part.updates.add_(1)
        part.state["exp_avg"].copy_(part.gradients.div_(divisor))
        part.decay_weights(learning_rate * self.weight_decay)
        for piece in part.pieces():
            weights, mean, square = (piece.state[name] for name in (MASTER, *self.names))
            size = (square / second_correction).sqrt_().add_(self.epsilon).mul_(first_correction)
            size.masked_fill_(square == 0, inf)
            weights.addcdiv_(mean, size, value=-learning_rate * part.update_settings.learning_rate_factor)
