"""Direct preference optimization (DPO, arXiv 2305.18290) of pairs of answers, one of which was preferred.

The two answers are neighbouring rows of a micro-batch, the chosen one first. Only tokens of answers are
targets. The field `reference` has the log-probabilities that the model gave them before training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.log_probabilities import LogProbabilityLoss, on_first_rank, sequence_sums
from hpctrain.objective.objective import LossFunction
from hpctrain.objective.pairs import PairObjective, pair_sums

REFERENCE = "reference"
"""Field of a micro-batch with the log-probabilities by the reference, fp32 [batch, seq]."""


@dataclass(frozen=True)
class DirectPreference(PairObjective):
    """DPO, conservative DPO and IPO.

    The margin of a pair is `beta` times the difference of (log-probability minus reference log-probability)
    between the chosen and the rejected answer. With the form "sigmoid" the loss is -log sigmoid(margin). A
    fraction `smoothing` of the labels is assumed to be wrong (conservative DPO). With "ipo" it is (margin /
    beta - 1 / (2 beta))^2, of means over the tokens of each answer (arXiv 2310.12036). Losses are means over
    pairs.

    Attributes:
        beta: Factor of the margin.
        form: "sigmoid" or "ipo".
        smoothing: Fraction of labels that are assumed to be wrong.
    """

    beta: float = 0.1
    form: Literal["sigmoid", "ipo"] = "sigmoid"
    smoothing: float = 0.0

    @override
    def loss_function(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        targets = inputs.fields["targets"].t()
        stored = inputs.fields.get(REFERENCE)
        reference = torch.zeros(targets.shape, device=targets.device) if stored is None else stored.t()

        def gradient_of(log_probabilities: Tensor, context: Group) -> tuple[Tensor, tuple[Tensor, ...]]:
            predicted = targets >= 0
            # Subtract for each token, so that the sums are small, and in fp64, because rows are long.
            log_ratios = sequence_sums((log_probabilities.double() - reference) * predicted, context)
            sizes = sequence_sums(predicted.double(), context)
            with torch.enable_grad():
                log_ratios.requires_grad_()
                losses, sums = self.pair_losses(log_ratios, sizes)
                (gradient,) = torch.autograd.grad(losses, log_ratios)
            return (gradient * predicted).float(), on_first_rank(sums, context)

        return LogProbabilityLoss(targets, scale, gradient_of)

    def pair_losses(self, log_ratios: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the pairs' losses, and the sums of all metrics in the order of `pair_sums`, fp64.

        Rows 2 i and 2 i + 1 are pair i, the chosen answer first. Pairs with an empty answer do not count.

        Args:
            log_ratios: For each row, log-probability of its answer minus that of the reference [batch].
            sizes: Number of tokens of each answer [batch].
        """
        present = (sizes[0::2] > 0) & (sizes[1::2] > 0)
        mean = sizes.clamp_min(1) if self.form == "ipo" else torch.ones_like(sizes)
        chosen, rejected = (log_ratios / mean)[0::2], (log_ratios / mean)[1::2]
        margin = self.beta * (chosen - rejected)
        if self.form == "ipo":
            losses = ((chosen - rejected) - 1 / (2 * self.beta)).square()
        else:
            right, wrong = functional.logsigmoid(margin), functional.logsigmoid(-margin)
            losses = -(1 - self.smoothing) * right - self.smoothing * wrong
        return pair_sums(present, losses, margin, self.beta * chosen, self.beta * rejected)
