"""Schedule-Free AdamW (arXiv 2405.15682): an average of weights replaces the decay of the learning rate.

Three sequences of weights take part: z makes the steps of AdamW, x is a running average of z and is the model
that is evaluated and stored, and gradients are computed at y, which lies between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.sharding.state import MASTER

ITERATE_OFFSET, SQUARE = "lead", "exp_avg_sq"

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass
class ScheduleFree:
    """Update rule with an average of weights.

    Update number k, with gradient g at y = (1 - b1) z + b1 x, is:

        v = b2 v + (1 - b2) g^2
        z = z - rate (g / (sqrt(v / (1 - b2^k)) + epsilon) + weight_decay y)
        x = (1 - c) x + c z,  c = rate_k^2 / (rate_1^2 + ... + rate_k^2)

    For c, each rate is the largest one so far. The master weights are x. The state "lead" is z - x, which is
    zero at the start.

    Attributes:
        betas: Numbers b1 and b2.
        epsilon: Number that is added to the root of the second moment.
        weight_decay: Weight decay of the elements that have it.
        totals: "largest_rate" so far, and "weights": the sum of the squared rates of all updates, divided by
            the square of the largest. So c = 1 / weights.
    """

    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    totals: dict[str, float] = field(default_factory=lambda: {"largest_rate": 0.0, "weights": 0.0})

    names: ClassVar[tuple[str, ...]] = (ITERATE_OFFSET, SQUARE)
    offset_name: ClassVar[str] = ITERATE_OFFSET

    def begin(self, learning_rate: float) -> None:
        """Update `totals` (largest rate, sum of weights) for the learning rate of the next update.

        The update follows in any number of calls of `update`.
        """
        before = self.totals["largest_rate"]
        largest = max(learning_rate, before)
        smaller = before / largest if largest else 1.0
        self.totals = {"largest_rate": largest, "weights": self.totals["weights"] * smaller**2 + 1.0}

    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements in place. The gradients are divided by `gradient_divisor` in place."""
        share, decay = 1 / self.totals["weights"], self.betas[1]
        for part in parts:
            decayed, factor = part.update_settings.has_weight_decay, part.update_settings.learning_rate_factor
            correction = 1 - decay ** part.updates.add_(1).double()
            part.gradients.div_(gradient_divisor)
            for piece in part.pieces():
                average, offset, square = (piece.state[name] for name in (MASTER, ITERATE_OFFSET, SQUARE))
                gradients = piece.gradients
                square.mul_(decay).addcmul_(gradients, gradients, value=1 - decay)
                # The smallest fp32 number prevents 0 / 0 for elements without gradients, which stay in place.
                size = (square / correction).sqrt_().add_(max(self.epsilon, _SMALLEST))
                step = torch.div(gradients, size, out=size)
                if decayed and self.weight_decay:
                    step.add_(self.training_weights(average, offset), alpha=self.weight_decay / factor)
                offset.sub_(step, alpha=learning_rate * factor)
                average.add_(offset, alpha=share)
                offset.mul_(1 - share)

    def training_weights(self, masters: Tensor, offset: Tensor) -> Tensor:
        """Return the weights that layers compute with in training, in new memory."""
        return masters.add(offset, alpha=1 - self.betas[0])
