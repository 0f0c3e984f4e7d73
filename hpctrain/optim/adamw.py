"""AdamW (arXiv 1711.05101), by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.optim.adamw import adamw

from hpctrain.optim.optimizer import Elements
from hpctrain.sharding.state import MASTER


@dataclass(frozen=True)
class AdamW:
    """Weight decay of decayed elements only. Its kernel and not torch's class: that imports torch's compiler,
    which takes a second and memory on every rank.
    """

    betas: tuple[float, float]
    epsilon: float
    weight_decay: float

    names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    by_element: ClassVar[bool] = True

    @torch.no_grad()
    def update(self, parts: Sequence[Elements], learning_rate: float, gradient_divisor: float) -> None:
        """Update in place, all that decays alike in one call."""
        for decayed in (True, False):
            alike = [part for part in parts if part.decayed is decayed]
            if not alike:
                continue
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
                grad_scale=torch.tensor(gradient_divisor, device=device),
                found_inf=torch.zeros((), device=device),
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=learning_rate,
                weight_decay=self.weight_decay if decayed else 0.0,
                eps=self.epsilon,
                maximize=False,
            )
