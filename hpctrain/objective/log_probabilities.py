"""Losses that are functions of the log-probabilities of the targets, as for DPO and policy optimization.

The gradient of such a loss is known only once all log-probabilities of a sequence are. Logits are not stored,
so the head computes them twice: first for the log-probabilities, then for the gradient, in which each token
has the weight that the loss gives it. Both passes, and one without gradients, have the same shapes and use
the same kernels. So a policy that has not been updated has exactly the log-probabilities of its reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.objective.objective import Losses, LossGradient
from hpctrain.objective.token_sampling import TokenSampling
from hpctrain.parallel.kernels.logits import SplitLogits
from hpctrain.parallel.vocabulary import VocabularyHead


@dataclass(frozen=True)
class LogProbabilityLoss:
    """Loss function of a micro-batch that depends on the log-probabilities of its targets.

    Attributes:
        targets: Targets [s/c, b] int64, negative where nothing is predicted.
        scale: Factor of the losses in the gradient.
        gradient_of: Function that computes the gradient and the metrics.
        sampling: If given, distribution whose probabilities are used.
    """

    targets: Tensor
    scale: Tensor
    gradient_of: LossGradient
    sampling: TokenSampling | None = None

    def __call__(self, head: VocabularyHead, hidden: Tensor) -> Losses:
        """Return the metrics, and a total from which the backward pass starts. Its value is not the loss."""
        values = log_probabilities(head, hidden, self.targets, self.sampling)
        gradient, metrics = self.gradient_of(values, head.layer_context.context)
        if not torch.is_grad_enabled():
            return Losses(torch.zeros_like(metrics[0]), metrics)
        # The log-probability is the negative cross-entropy.
        weights = -gradient.reshape(-1) * self.scale
        entropy = CrossEntropy(self.targets, weights, sampling=self.sampling)
        return Losses(entropy(head, hidden).total, metrics)


def log_probabilities(
    head: VocabularyHead, hidden: Tensor, targets: Tensor, sampling: TokenSampling | None = None
) -> Tensor:
    """Return the log-probabilities of targets, fp32 [seq, batch], without gradients.

    Collective over the tensor group.

    Args:
        head: Head of the model.
        hidden: Last hidden states.
        targets: Targets [seq, batch]; where they are negative, the result is 0.
        sampling: If given, distribution whose probabilities are used.
    """
    result = torch.zeros(targets.numel(), device=targets.device)
    entropy = CrossEntropy(targets, targets.new_zeros(()), sampling=sampling)

    def record(logits: SplitLogits, rows: slice, needs_gradient: bool) -> tuple[Tensor, None]:
        losses, _ = entropy.chunk_losses(head, logits, rows, needs_gradient)
        result[rows] = -losses
        return losses, None

    with torch.no_grad():
        head(hidden, record)
    return result.view(targets.shape)


def sequence_sums(values: Tensor, context: Group) -> Tensor:
    """Return the sums [b] of values [s/c, b] over whole sequences. Collective over `context`.

    It is a plain all-reduce, through which autograd does not pass: call it on values without gradients.
    """
    sums = values.sum(0)
    return context.all_reduce(sums) if context.size > 1 else sums


def on_first_rank(metrics: Tensor, context: Group) -> tuple[Tensor, ...]:
    """Return the metrics on the first rank of `context` and zeros on the others, for a sum over all ranks."""
    return tuple((metrics * (context.rank == 0)).unbind())
