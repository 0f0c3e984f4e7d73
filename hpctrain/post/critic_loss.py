"""Loss of a critic: predicted against observed returns (PPO, arXiv 1707.06347)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.objective import LossFunction, Objective
from hpctrain.objective.scores import ScoreLoss

RETURNS, VALUES = "returns", "values"
"""Fields of a micro-batch, fp32 [batch, seq]: observed returns, and values when the answers were sampled."""


@dataclass(frozen=True)
class ClippedValue(Objective):
    """Squared error of a critic's values, clipped around the old values.

    The value of a position whose next token belongs to an answer is the head's score there. Its loss is half
    of the larger one of two squared errors against the return: that of the value, and that of the value
    clipped to the old value plus or minus `clip`. Metrics are means over such positions: `loss`, `value`, and
    `clip_share`, the fraction where the clipped error is larger.

    Attributes:
        clip: Largest change of the value that is not clipped.
    """

    clip: float = 0.2
    metrics: ClassVar[tuple[str, ...]] = ("loss", "value", "clip_share")

    @override
    def loss_function(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        predicted = inputs.fields["targets"].t() >= 0
        # Passes that only compute scores have no returns yet.
        zeros = torch.zeros(predicted.shape, device=predicted.device).t()
        returns, old_values = (inputs.fields.get(name, zeros).t() for name in (RETURNS, VALUES))

        def gradient_of(scores: Tensor, context: Group) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG001
            # Scores where nothing is predicted may have any value.
            with torch.enable_grad():
                scores = scores.requires_grad_()
                clipped_values = old_values + (scores - old_values).clamp(-self.clip, self.clip)
                free, limited = (scores - returns).square(), (clipped_values - returns).square()
                losses = (0.5 * torch.maximum(free, limited)).masked_fill(~predicted, 0.0)
                (gradient,) = torch.autograd.grad(losses.sum(), scores)
            # Within the clip both errors are equal except for rounding.
            clipped = (limited > free) & ((scores - old_values).abs() > self.clip)
            metrics = (losses, scores, clipped.double())
            sums = (each.detach().double().masked_fill(~predicted, 0.0).sum() for each in metrics)
            return gradient.masked_fill(~predicted, 0.0), tuple(sums)

        return ScoreLoss(scale, gradient_of)
