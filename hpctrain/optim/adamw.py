"""AdamW (arXiv 1711.05101), by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hpctrain.optim.optimizer import MASTER, Elements


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

    def update(self, parts: Sequence[Elements], learning_rate: float, gradient_divisor: float) -> None:
        """Update in place, all that decays alike in one call."""
        for decayed in (True, False):
            alike = [part for part in parts if part.decayed is decayed]
            if alike:
                fused_update(
                    [part.state[MASTER] for part in alike],
                    [part.gradients for part in alike],
                    [part.state["exp_avg"] for part in alike],
                    [part.state["exp_avg_sq"] for part in alike],
                    [part.updates for part in alike],
                    learning_rate,
                    self.weight_decay if decayed else 0.0,
                    self.betas,
                    self.epsilon,
                    gradient_divisor,
                )


@torch.no_grad()
def fused_update(
    masters: list[Tensor],
    gradients: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    updates: list[Tensor],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float,
    gradient_divisor: float = 1.0,
) -> None:
    """One AdamW update (arXiv 1711.05101) in place, by torch's fused kernel.

    The lists are of equal length; masters, gradients and moments of one number are fp32 tensors of one shape,
    `updates` scalars that count the updates before this one. The gradients are divided afterwards.
    """
    device = masters[0].device
    adamw(
        masters,
        gradients,
        exp_avg,
        exp_avg_sq,
        [],
        updates,
        fused=True,
        # The kernel divides by it while it reads: no pass over the gradients is added.
        grad_scale=torch.tensor(gradient_divisor, device=device),
        found_inf=torch.zeros((), device=device),
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=False,
    )
