"""Policy optimization: PPO's clipped surrogate loss (arXiv 1707.06347) and GRPO (arXiv 2402.03300).

The loss raises the probability of sampled answers that were better than expected. Clipping limits how far an
update moves the policy from the one that sampled them. GRPO uses the same loss, with advantages of whole
answers, and adds the divergence from a reference model to the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.dpo import REFERENCE
from hpctrain.objective.log_probabilities import LogProbabilityLoss, on_first_rank, sequence_sums
from hpctrain.objective.objective import LossFunction, Objective
from hpctrain.objective.token_sampling import TokenSampling

ADVANTAGES, OLD = "advantages", "old"
"""Fields of a micro-batch, fp32 [batch, seq]: advantages of tokens, and log-probabilities when sampled."""

Estimate = Literal["k1", "k3"]
Mean = Literal["tokens", "answers", "constant"]


def divergence(log_probabilities: Tensor, reference: Tensor, estimate: Estimate) -> Tensor:
    """Return estimates of the KL divergence of a policy from a reference, for tokens that the policy sampled.

    "k1", the difference of log-probabilities, is unbiased. "k3", exp(-k1) - 1 + k1, is unbiased and never
    negative (Schulman, Approximating KL divergence, 2020).

    Args:
        log_probabilities: Log-probabilities of the tokens by the policy.
        reference: Log-probabilities under the reference model, in the same shape.
        estimate: "k1" or "k3".
    """
    log_ratios = log_probabilities - reference
    return log_ratios if estimate == "k1" else torch.expm1(-log_ratios) + log_ratios


@dataclass(frozen=True)
class PolicyOptimization(Objective):
    """Clipped surrogate loss, plus `beta` times the divergence from the reference.

    The surrogate is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), where A is the advantage of a token
    and r the ratio of its probability to that when it was sampled.

    Metrics other than the loss are means over tokens. `clip_share` is the fraction of tokens whose
    gradient is zero because their ratio is clipped, and `moved` the estimated KL divergence from the policy
    that sampled them (`clip_fraction` and `approx_kl` of Stable-Baselines3). `entropy` is estimated by the
    negative log-probabilities, and `kl` is the divergence from the reference.

    Attributes:
        clip_low: Distance of the clip range below 1.
        clip_high: Distance of the clip range above 1.
        mean: "tokens": mean over all tokens. "answers": mean over answers of the mean over each one's tokens.
            "constant": mean over answers of the sum over each one's tokens divided by `max_tokens` (arXiv
            2503.20783).
        max_tokens: Longest possible answer, for "constant".
        beta: Weight of the divergence from the reference.
        estimate: Estimate of this divergence.
        has_reference: True if there is a reference model, and so a metric `kl`.
        sampling: If given, distribution whose probabilities are used.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    mean: Mean = "tokens"
    max_tokens: int = 1
    beta: float = 0.0
    estimate: Estimate = "k3"
    has_reference: bool = False
    sampling: TokenSampling | None = None

    @property
    @override
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics. The last one is the divisor of the loss, which `normalize` removes."""
        return ("loss", "clip_share", "moved", "entropy", *(["kl"] if self.has_reference else []), "divisor")

    @override
    def normalize(self, metrics: dict[str, float]) -> float:
        """Divide the loss by its divisor, in place, and return what gradients must still be divided by.

        Gradients were divided by the count of tokens. The result is the true divisor over that count.
        """
        divisor = metrics.pop("divisor") or 1.0
        metrics["loss"] /= divisor
        return divisor

    @override
    def loss_function(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        names = (name for name in (OLD, ADVANTAGES, REFERENCE) if name in inputs.fields)
        fields = {name: inputs.fields[name].t() for name in names}
        targets = inputs.fields["targets"].t()
        predicted = targets >= 0

        def gradient_of(log_probabilities: Tensor, context: Group) -> tuple[Tensor, tuple[Tensor, ...]]:
            weights, divisor = self.weights(predicted, context)
            with torch.enable_grad():
                leaf = log_probabilities.detach().requires_grad_()
                each, metrics = self.token_losses(leaf, with_defaults(log_probabilities, fields))
                losses = (each * weights).sum()
                (gradient,) = torch.autograd.grad(losses, leaf)
            sums = [(value * predicted).double().sum() for value in metrics]
            return gradient, (losses.detach().double(), *sums, divisor)

        return LogProbabilityLoss(targets, scale, gradient_of, self.sampling)

    def weights(self, predicted: Tensor, context: Group) -> tuple[Tensor, Tensor]:
        """Return the weight of each token in the sum of losses, and the divisor. Collective over `context`.

        Args:
            predicted: For each token [s/c, b], whether it is predicted.
            context: Ranks that hold the other pieces of the sequences.

        Returns:
            Weights [s/c, b], and this rank's part of the divisor of the sum.
        """
        if self.mean == "tokens":
            return predicted.float(), predicted.sum().double()
        lengths = sequence_sums(predicted.double(), context)
        (answers,) = on_first_rank((lengths > 0).double().sum().unsqueeze(0), context)
        if self.mean == "constant":
            return predicted.float() / self.max_tokens, answers
        return predicted.float() / lengths.clamp_min(1).float(), answers

    def token_losses(
        self, log_probabilities: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of each token, and its metrics other than the loss, in the order of `metrics`.

        Args:
            log_probabilities: Log-probabilities of the sampled tokens by the policy [s/c, b].
            fields: Fields of the micro-batch, each [s/c, b], after `with_defaults`.
        """
        log_ratio = log_probabilities - fields[OLD]
        ratio, advantages = log_ratio.exp(), fields[ADVANTAGES]
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        losses = -torch.minimum(ratio * advantages, clipped)
        with torch.no_grad():
            metrics = [
                (clipped < ratio * advantages).float(),
                divergence(fields[OLD], log_probabilities, "k3"),
                -log_probabilities,
            ]
        if self.has_reference:
            from_reference = divergence(log_probabilities, fields[REFERENCE], self.estimate)
            if self.beta:
                losses = losses + self.beta * from_reference
            metrics.append(from_reference.detach())
        return losses, metrics


def with_defaults(log_probabilities: Tensor, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the fields of a micro-batch, with defaults for those that are missing.

    Plans and layout checks leave fields out. The defaults are those of tokens that were just sampled, with an
    advantage of 1 and the reference's log-probabilities equal to the policy's.
    """
    current = log_probabilities.detach()
    return {OLD: current, ADVANTAGES: torch.ones_like(current), REFERENCE: current, **fields}
