"""Losses that are functions of one score per token, as in reward models and critics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hpctrain.objective.objective import Losses, LossGradient
from hpctrain.parallel.scalar_head import ScalarHead


@dataclass(frozen=True)
class ScoreLoss:
    """Loss function of a micro-batch whose head computes one score per token.

    Attributes:
        scale: Factor of the losses in the gradient.
        gradient_of: Function that computes the gradient and the metrics.
    """

    scale: Tensor
    gradient_of: LossGradient

    def __call__(self, head: ScalarHead, hidden: Tensor) -> Losses:
        """Return the metrics, and a total from which the backward pass starts, whose value is 0."""
        metrics: tuple[Tensor, ...] = ()

        def score_loss(scores: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal metrics
            gradient, metrics = self.gradient_of(scores, head.layer_context.context)
            return scores.new_zeros(()), gradient.float() * self.scale

        return Losses(head(hidden, score_loss), metrics)
