"""Schedule-Free AdamW (arXiv 2405.15682): in place of a decay of the rate, the model is an average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.sharding.state import MASTER

LEAD, SQUARE = "lead", "exp_avg_sq"

_PIECE = 1 << 20
"""Elements that are updated at a time, which takes memory for each."""

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass
class ScheduleFree:
    """With b1, b2 the `betas`, gradients g are those at y = (1 - b1) z + b1 x, of which z makes the steps of
    AdamW without momentum, and x is their average:

        v = b2 v + (1 - b2) g^2,  z -= rate (g / (sqrt(v / (1 - b2^k)) + epsilon) + weight_decay y),
        x = (1 - c) x + c z,  c = rate_k^2 / (rate_1^2 + ... + rate_k^2)

    in the k-th update, where for c each rate is the largest so far, and y has decay where elements are
    decayed. The masters are x; the state has the lead z - x of z, so that all begins at the weights.

    `totals` are the largest rate so far, and the sum of its square over updates in units of the newest one,
    which neither grows nor vanishes with the rate.
    """

    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    totals: dict[str, float] = field(default_factory=lambda: {"largest_rate": 0.0, "weights": 0.0})

    names: ClassVar[tuple[str, ...]] = (LEAD, SQUARE)
    lead: ClassVar[str] = LEAD

    def begin(self, learning_rate: float) -> None:
        """Prepare for an update, which follows in any number of parts."""
        before = self.totals["largest_rate"]
        largest = max(learning_rate, before)
        smaller = before / largest if largest else 1.0
        self.totals = {"largest_rate": largest, "weights": self.totals["weights"] * smaller**2 + 1.0}

    @torch.no_grad()
    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements in place. The gradients are divided by `gradient_divisor` in place."""
        share, kept = 1 / self.totals["weights"], self.betas[1]
        for part in parts:
            decayed, factor = part.treatment.decayed, part.treatment.rate
            grown = 1 - kept ** part.updates.add_(1).double()
            gradients = part.gradients.div_(gradient_divisor)
            for first in range(0, gradients.numel(), _PIECE):
                piece = slice(first, first + _PIECE)
                state = {name: flat[piece] for name, flat in part.state.items()}
                average, lead, square = state[MASTER], state[LEAD], state[SQUARE]
                square.mul_(kept).addcmul_(gradients[piece], gradients[piece], value=1 - kept)
                # Single precision knows no smaller size, by which what has no gradient stays where it is.
                size = (square / grown).sqrt_().add_(max(self.epsilon, _SMALLEST))
                step = torch.div(gradients[piece], size, out=size)
                if decayed and self.weight_decay:
                    step.add_(self.computed(average, lead), alpha=self.weight_decay / factor)
                lead.sub_(step, alpha=learning_rate * factor)
                average.add_(lead, alpha=share)
                lead.mul_(1 - share)

    def computed(self, masters: Tensor, lead: Tensor) -> Tensor:
        """Return the weights that layers compute with in training, in new memory."""
        return masters.add(lead, alpha=1 - self.betas[0])
