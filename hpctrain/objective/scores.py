"""Losses that are functions of one number a token: those of reward models and of critics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.objective.objective import Losses
from hpctrain.parallel.scalar_head import ScalarHead


class OfTheseScores(Protocol):
    """A loss as a function of scores."""

    def __call__(self, scores: Tensor, context: Group) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Of fp32 [s/c, b], a piece of sequences that lie over `context`: the gradient of the sum of losses
        by them, as large, and this rank's sums of figures, fp64.
        """


@dataclass(frozen=True)
class OfScores:
    """See LossOf. `scale` is the factor of the losses in the gradient."""

    scale: Tensor
    weigh: OfTheseScores

    def __call__(self, head: ScalarHead, hidden: Tensor) -> Losses:
        """The figures, and what backward begins from, whose value is no loss."""
        figures: tuple[Tensor, ...] = ()

        def of_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal figures
            gradient, figures = self.weigh(scores, head.groups.context)
            return scores.new_zeros(()), gradient.float() * self.scale

        return Losses(head(hidden, of_scores), figures)
