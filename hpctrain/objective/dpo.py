"""Direct preference optimization (arXiv 2305.18290) of pairs of answers, of which one was preferred.

A micro-batch has them as rows next to each other, the chosen answer's first. `targets` are those of answers
alone, and `reference` has the log-probabilities that the model had of these before it was trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.group import Group
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.log_probabilities import OfLogProbabilities, counted_once, whole_sums
from hpctrain.objective.objective import LossOf
from hpctrain.objective.pairs import OfPairs

REFERENCE = "reference"
"""The field of a micro-batch that has the log-probabilities of the reference, fp32 [b, s]."""


@dataclass(frozen=True)
class DirectPreference(OfPairs):
    """How much more the model has learned to prefer the chosen answer than the reference does, is its margin:
    the difference of the two differences of log-probabilities, times `beta`.

    "sigmoid": -log sigmoid(margin), of labels of which a share `smoothing` is taken to be wrong (conservative
    DPO). "ipo": (margin / beta - 1 / (2 beta))^2, of means over each answer's tokens (arXiv 2310.12036).
    Losses are means over pairs.
    """

    beta: float = 0.1
    form: Literal["sigmoid", "ipo"] = "sigmoid"
    smoothing: float = 0.0

    def losses(self, inputs: ModelInputs, scale: Tensor) -> LossOf:
        """Return the function that computes the losses of a micro-batch."""
        targets = inputs.fields["targets"].t()
        given = inputs.fields.get(REFERENCE)
        reference = torch.zeros(targets.shape, device=targets.device) if given is None else given.t()

        def weigh(log_probabilities: Tensor, context: Group) -> tuple[Tensor, tuple[Tensor, ...]]:
            predicted = targets >= 0
            # Of each token, so that sums are of small numbers; twice as long, as rows are of thousands.
            ahead = whole_sums((log_probabilities.double() - reference) * predicted, context)
            sizes = whole_sums(predicted.double(), context)
            with torch.enable_grad():
                ahead.requires_grad_()
                losses, told = self.of_answers(ahead, sizes)
                (gradient,) = torch.autograd.grad(losses, ahead)
            return (gradient * predicted).float(), counted_once(told, context)

        return OfLogProbabilities(targets, scale, weigh)

    def of_answers(self, ahead: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the pairs' losses, and the sums of all figures, fp64; of how far each row's answer is
        `ahead` [b] of the reference, and of how many tokens it has. Pairs of no tokens are none.
        """
        present = (sizes[0::2] > 0) & (sizes[1::2] > 0)
        mean = sizes.clamp_min(1) if self.form == "ipo" else torch.ones_like(sizes)
        chosen, rejected = (ahead / mean)[0::2], (ahead / mean)[1::2]
        margin = self.beta * (chosen - rejected)
        if self.form == "ipo":
            losses = ((chosen - rejected) - 1 / (2 * self.beta)).square()
        else:
            wrong = self.smoothing
            losses = -(1 - wrong) * functional.logsigmoid(margin) - wrong * functional.logsigmoid(-margin)
        # One that is neither ahead nor behind is half right, as one of two alike is by chance.
        right = (margin > 0).double() + 0.5 * (margin == 0)
        told = (losses, right, margin, self.beta * chosen, self.beta * rejected, torch.ones_like(margin))
        sums = torch.stack([(each.detach() * present).sum() for each in told])
        return (losses * present).sum(), sums
