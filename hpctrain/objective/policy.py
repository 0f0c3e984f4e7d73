"""Policy optimization: a model is moved towards what it wrote that was better than expected, and not too far.

PPO's clipped surrogate (arXiv 1707.06347) of a token's chance now and when it was drawn; GRPO (arXiv
2402.03300) has the same, with advantages of whole answers, and its divergence from the reference in the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.data.batches import MicroBatch
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.dpo import REFERENCE
from hpctrain.objective.log_probabilities import OfLogProbabilities, counted_once, whole_sums
from hpctrain.objective.objective import LossOf
from hpctrain.objective.token_sampling import TokenSampling

ADVANTAGES, OLD = "advantages", "old"
"""Fields of a micro-batch, fp32 [b, s]: what each token was worth beyond what was expected, and its
log-probability when it was drawn.
"""

Estimate = Literal["k1", "k3"]
Mean = Literal["tokens", "answers", "constant"]


def divergence(log_probabilities: Tensor, reference: Tensor, estimate: Estimate) -> Tensor:
    """Of the policy from the reference at tokens that the policy drew, by their log-probabilities: "k1", the
    difference, is right on average; "k3", exp(-k1) - 1 + k1, too, and never negative (Schulman, Approximating
    KL divergence, 2020).
    """
    ahead = log_probabilities - reference
    return ahead if estimate == "k1" else torch.expm1(-ahead) + ahead


@dataclass(frozen=True)
class PolicyOptimization:
    """The surrogate -min(r A, clip(r, 1 - low, 1 + high) A), r the token's chance by that when it was drawn;
    plus `beta` times the divergence from the reference.

    It is a mean over all "tokens"; over "answers", of the mean over each one's tokens; or over answers of
    "constant": the sum over each one's tokens by `longest` (arXiv 2503.20783).

    Figures beside the loss are means over tokens: `clip_share` of those whose gradient is clipped away,
    `moved` the divergence from the policy that drew them, `entropy` as estimated by their own
    log-probabilities; `kl` from the reference, where there is one. Chances are those of a `drawing`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    mean: Mean = "tokens"
    longest: int = 1
    beta: float = 0.0
    estimate: Estimate = "k3"
    referenced: bool = False
    drawing: TokenSampling | None = None

    @property
    def figures(self) -> tuple[str, ...]:
        """See Objective; the last one is what losses are divided by."""
        return ("loss", "clip_share", "moved", "entropy", *(["kl"] if self.referenced else []), "divisor")

    def count(self, micro_batch: MicroBatch) -> int:
        """Tokens of answers."""
        return int((micro_batch.targets >= 0).sum())

    def settle(self, figures: dict[str, float]) -> float:
        """See Objective: what the loss is divided by, for each token."""
        divisor = figures.pop("divisor") or 1.0
        figures["loss"] /= divisor
        return divisor

    def losses(self, inputs: ModelInputs, scale: Tensor) -> LossOf:
        """Return the function that computes the losses of a micro-batch."""
        given = (name for name in (OLD, ADVANTAGES, REFERENCE) if name in inputs.fields)
        fields = {name: inputs.fields[name].t() for name in given}
        targets = inputs.fields["targets"].t()
        predicted = targets >= 0

        def weigh(log_probabilities: Tensor, context: Group) -> tuple[Tensor, tuple[Tensor, ...]]:
            weights, divisor = self.weights(predicted, context)
            with torch.enable_grad():
                own = log_probabilities.detach().requires_grad_()
                each, told = self.of_tokens(own, known(log_probabilities, fields))
                losses = (each * weights).sum()
                (gradient,) = torch.autograd.grad(losses, own)
            sums = [(value * predicted).double().sum() for value in told]
            return gradient, (losses.detach().double(), *sums, divisor)

        return OfLogProbabilities(targets, scale, weigh, self.drawing)

    def weights(self, predicted: Tensor, context: Group) -> tuple[Tensor, Tensor]:
        """Of each token [s/c, b] in the sum of losses, and this rank's part of what that is divided by."""
        if self.mean == "tokens":
            return predicted.float(), predicted.sum().double()
        lengths = whole_sums(predicted.double(), context)
        (answers,) = counted_once((lengths > 0).double().sum().unsqueeze(0), context)
        if self.mean == "constant":
            return predicted.float() / self.longest, answers
        return predicted.float() / lengths.clamp_min(1).float(), answers

    def of_tokens(
        self, log_probabilities: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Losses of tokens, and the figures of each, in the order of `figures`."""
        moved = log_probabilities - fields[OLD]
        ratio, advantages = moved.exp(), fields[ADVANTAGES]
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        losses = -torch.minimum(ratio * advantages, clipped)
        with torch.no_grad():
            told = [
                (clipped < ratio * advantages).float(),
                divergence(fields[OLD], log_probabilities, "k3"),
                -log_probabilities,
            ]
        if self.referenced:
            apart = divergence(log_probabilities, fields[REFERENCE], self.estimate)
            if self.beta:
                losses = losses + self.beta * apart
            told.append(apart.detach())
        return losses, told


def known(log_probabilities: Tensor, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fields, and in place of those that a plan or a check of layouts leaves out: each token was drawn
    just now, worth 1, and no different by the reference.
    """
    same = log_probabilities.detach()
    return {OLD: same, ADVANTAGES: torch.ones_like(same), REFERENCE: same, **fields}
