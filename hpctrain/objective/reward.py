"""Training of a reward model from pairs of answers, one of which was preferred.

The loss is that of the Bradley-Terry model of comparisons, as in InstructGPT (arXiv 2203.02155) and, with
margins, in Llama 2 (arXiv 2307.09288). The two answers are neighbouring rows of a micro-batch, the chosen one
first. Only tokens of answers are targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.data.conversations import MARGIN
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.log_probabilities import on_first_rank, sequence_sums
from hpctrain.objective.objective import LossFunction
from hpctrain.objective.pairs import PairObjective, pair_sums
from hpctrain.objective.scores import ScoreLoss


@dataclass(frozen=True)
class PairwiseReward(PairObjective):
    """Loss of a reward model.

    The reward of an answer is the score of its last token (see `answer_ends`). The loss of a pair is -log
    sigmoid(chosen reward - rejected reward - margins). Losses are means over pairs.

    Attributes:
        margin: Margin of all pairs, to which the margin of a pair's row is added, if any.
        centering: Weight of the squared sum of both rewards, which keeps rewards around zero (arXiv
            2312.09244).
    """

    margin: float = 0.0
    centering: float = 0.0

    @override
    def loss_function(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        targets, margins = inputs.fields["targets"].t(), inputs.fields.get(MARGIN)
        extra_margins = None if margins is None else margins[0::2, 0]  # the same at all positions

        def gradient_of(scores: Tensor, context: Group) -> tuple[Tensor, tuple[Tensor, ...]]:
            ends = answer_ends(targets, inputs.positions, context)
            at_end = inputs.positions.unsqueeze(1) == ends
            rewards = sequence_sums(scores.double().masked_fill(~at_end, 0.0), context)
            with torch.enable_grad():
                rewards.requires_grad_()
                losses, sums = self.pair_losses(rewards, ends >= 0, extra_margins)
                (gradient,) = torch.autograd.grad(losses, rewards)
            return gradient * at_end, on_first_rank(sums, context)

        return ScoreLoss(scale, gradient_of)

    def pair_losses(
        self, rewards: Tensor, present: Tensor, extra_margins: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the pairs' losses, and the sums of all metrics in the order of `pair_sums`, fp64.

        Rows 2 i and 2 i + 1 are pair i, the chosen answer first. Pairs in which a row has no answer do not
        count.

        Args:
            rewards: Reward of each row [batch].
            present: For each row, whether it has an answer.
            extra_margins: Margins of the pairs [batch / 2] in addition to `margin`, or None.
        """
        complete = present[0::2] & present[1::2]
        chosen, rejected = rewards[0::2], rewards[1::2]
        difference = chosen - rejected
        margin = self.margin if extra_margins is None else self.margin + extra_margins.double()
        losses = -functional.logsigmoid(difference - margin)
        if self.centering:
            losses = losses + self.centering * (chosen + rejected).square()
        return pair_sums(complete, losses, difference, chosen, rejected)


def answer_ends(targets: Tensor, positions: Tensor, context: Group) -> Tensor:
    """Return the position [batch] of the last token of each row's answer; -1 if there is none. Collective.

    The last target of a row is the end marker of its answer. It is an input one position later. If the row is
    cut there, it is not an input, and the token before it counts as the last one.

    Args:
        targets: Targets [s/c, b], negative where nothing is predicted.
        positions: Positions [s/c] of this piece of the sequences.
        context: Ranks that hold the other pieces, which all call this function.
    """
    last = torch.where(targets >= 0, positions.unsqueeze(1) + 1, -1).amax(0)
    if context.size > 1:
        last = context.all_reduce(last, "max")
    return last.clamp_max(len(targets) * context.size - 1)
