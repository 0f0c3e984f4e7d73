"""A critic's loss: what it says of the rewards to come, against what came (PPO, arXiv 1707.06347)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.data.batches import MicroBatch
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.objective import LossOf
from hpctrain.objective.scores import OfScores

RETURNS, VALUES = "returns", "values"
"""Fields of a micro-batch, fp32 [b, s]: what came, and what the critic said of it when it came."""


@dataclass(frozen=True)
class ClippedValue:
    """The value of a place whose target, a token of an answer, is to be predicted is the score there. Its
    loss is half the square of what it is off the return, or would be off, had it moved from the old value by
    no more than `clip`, whichever is larger. Figures are means over such places; `clip_share` is how
    often the latter is larger.
    """

    clip: float = 0.2
    figures: ClassVar[tuple[str, ...]] = ("loss", "value", "clip_share")

    def count(self, micro_batch: MicroBatch) -> int:
        """Tokens of answers."""
        return int((micro_batch.targets >= 0).sum())

    def settle(self, figures: dict[str, float]) -> float:  # noqa: ARG002
        """See Objective: the count is known before."""
        return 1.0

    def losses(self, inputs: ModelInputs, scale: Tensor) -> LossOf:
        """Return the function that computes the losses of a micro-batch."""
        predicted = inputs.fields["targets"].t() >= 0
        # Where scores alone are asked for, nothing has come yet.
        nothing = torch.zeros(predicted.shape, device=predicted.device).t()
        returns, before = (inputs.fields.get(name, nothing).t() for name in (RETURNS, VALUES))

        def weigh(scores: Tensor, context: Group) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG001
            # What stands where nothing is predicted may be anything.
            with torch.enable_grad():
                scores = scores.requires_grad_()
                held = before + (scores - before).clamp(-self.clip, self.clip)
                free, limited = (scores - returns).square(), (held - returns).square()
                losses = (0.5 * torch.maximum(free, limited)).masked_fill(~predicted, 0.0)
                (gradient,) = torch.autograd.grad(losses.sum(), scores)
            # Within the clip both are the same but for rounding.
            clipped = (limited > free) & ((scores - before).abs() > self.clip)
            told = (losses, scores, clipped.double())
            sums = (each.detach().double().masked_fill(~predicted, 0.0).sum() for each in told)
            return gradient.masked_fill(~predicted, 0.0), tuple(sums)

        return OfScores(scale, weigh)
