"""A reward model of pairs of answers, of which one was preferred: Bradley and Terry's model of comparisons,
as InstructGPT (arXiv 2203.02155) and Llama 2 (arXiv 2307.09288, with margins) train it.

A micro-batch has the two answers as rows next to each other, the chosen one's first; `targets` are those of
answers alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.group import Group
from hpctrain.data.conversations import MARGIN
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.log_probabilities import counted_once, whole_sums
from hpctrain.objective.objective import LossOf
from hpctrain.objective.pairs import OfPairs
from hpctrain.objective.scores import OfScores


@dataclass(frozen=True)
class PairwiseReward(OfPairs):
    """The reward of an answer is the score of its last token, see `answer_ends`. A pair's loss is -log
    sigmoid of the chosen one's reward minus the other's, minus `margin` and what its row asks for besides.

    `centering` weighs the square of their sum, which keeps rewards about zero (arXiv 2312.09244). Losses are
    means over pairs.
    """

    margin: float = 0.0
    centering: float = 0.0

    def losses(self, inputs: ModelInputs, scale: Tensor) -> LossOf:
        """Return the function that computes the losses of a micro-batch."""
        targets, margins = inputs.fields["targets"].t(), inputs.fields.get(MARGIN)
        wanted = None if margins is None else margins[0::2, 0]  # every place of a row has it

        def weigh(scores: Tensor, context: Group) -> tuple[Tensor, tuple[Tensor, ...]]:
            ends = answer_ends(targets, inputs.positions, context)
            here = inputs.positions.unsqueeze(1) == ends
            rewards = whole_sums(scores.double().masked_fill(~here, 0.0), context)
            with torch.enable_grad():
                rewards.requires_grad_()
                losses, told = self.of_answers(rewards, ends >= 0, wanted)
                (gradient,) = torch.autograd.grad(losses, rewards)
            return gradient * here, counted_once(told, context)

        return OfScores(scale, weigh)

    def of_answers(self, rewards: Tensor, there: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of the pairs' losses, and the sums of all figures, fp64; of each row's reward [b], whether
        it has an answer, and margins [b / 2] that are `wanted` besides.
        """
        present = there[0::2] & there[1::2]
        chosen, rejected = rewards[0::2], rewards[1::2]
        ahead = chosen - rejected
        least = self.margin if wanted is None else self.margin + wanted.double()
        losses = -functional.logsigmoid(ahead - least)
        if self.centering:
            losses = losses + self.centering * (chosen + rejected).square()
        right = (ahead > 0).double() + 0.5 * (ahead == 0)
        told = (losses, right, ahead, chosen, rejected, torch.ones_like(ahead))
        sums = torch.stack([each.detach().masked_fill(~present, 0.0).sum() for each in told])
        return losses.masked_fill(~present, 0.0).sum(), sums


def answer_ends(targets: Tensor, positions: Tensor, context: Group) -> Tensor:
    """The place [b] of the last token of each row's answer that is among the inputs, -1 where there is none;
    of a piece [s/c, b] of targets, and the places [s/c] of it. Collective over `context`.

    The last token to be predicted is an answer's last one (its end marker), and stands among the inputs one
    place further on. Where the row is cut there, it is no input, and the one before it counts as the last.
    """
    last = torch.where(targets >= 0, positions.unsqueeze(1) + 1, -1).amax(0)
    if context.size > 1:
        last = context.all_reduce(last, "max")
    return last.clamp_max(len(targets) * context.size - 1)
