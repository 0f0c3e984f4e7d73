"""Losses that are functions of the log-probabilities that a model gives its targets.

What such a loss has for a gradient is known only once all log-probabilities of a sequence are, and no logits
are kept: the head computes them twice, first for the log-probabilities, then for the gradient, in which each
token's own has the weight that the loss gives it. Both passes, and one without gradients, are of the same
shape and kernels: a policy that has not moved yet is its own reference to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.objective.objective import Losses
from hpctrain.objective.token_sampling import TokenSampling
from hpctrain.parallel.partition import SplitLogits
from hpctrain.parallel.vocabulary import VocabularyHead


class Weighing(Protocol):
    """A loss as a function of log-probabilities."""

    def __call__(self, log_probabilities: Tensor, context: Group) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Of fp32 [s/c, b], zero where nothing is predicted, a piece of sequences that lie over `context`:
        the gradient of the sum of losses by them, as large, and this rank's sums of figures.
        """


@dataclass(frozen=True)
class OfLogProbabilities:
    """See LossOf; of `targets` [s/c, b] int64, negative where nothing is predicted. `scale` is the factor of
    the losses in the gradient. Log-probabilities are by the chances of a `drawing`.
    """

    targets: Tensor
    scale: Tensor
    weigh: Weighing
    drawing: TokenSampling | None = None

    def __call__(self, head: VocabularyHead, hidden: Tensor) -> Losses:
        """The figures, and what backward begins from, whose value is no loss."""
        found = log_probabilities(head, hidden, self.targets, self.drawing)
        gradient, figures = self.weigh(found, head.groups.context)
        if not torch.is_grad_enabled():
            return Losses(torch.zeros_like(figures[0]), figures)
        # The log-probability is the cross-entropy with its sign turned.
        weights = -gradient.reshape(-1) * self.scale
        entropy = CrossEntropy(self.targets, weights, drawing=self.drawing)
        return Losses(entropy(head, hidden).total, figures)


def log_probabilities(
    head: VocabularyHead, hidden: Tensor, targets: Tensor, drawing: TokenSampling | None = None
) -> Tensor:
    """Of the targets [s, b], zero where these are negative: fp32 [s, b]. No gradient goes through."""
    flat = targets.reshape(-1)
    found = torch.zeros(flat.shape, device=flat.device)
    entropy = CrossEntropy(targets, flat.new_zeros(()), drawing=drawing)

    def note(logits: SplitLogits, rows: slice, learning: bool) -> tuple[Tensor, None]:
        losses, _ = entropy.of_chunk(head, flat, logits, rows, learning=learning)
        found[rows] = -losses
        return losses, None

    with torch.no_grad():
        head(hidden, note)
    return found.view(targets.shape)


def whole_sums(values: Tensor, context: Group) -> Tensor:
    """Sums over whole sequences [b] of a piece of them [s/c, b], the same on all ranks of `context`."""
    sums = values.sum(0)
    return context.all_reduce(sums) if context.size > 1 else sums


def counted_once(figures: Tensor, context: Group) -> tuple[Tensor, ...]:
    """Sums that all ranks of `context` have alike, of which one is to tell them."""
    return tuple((figures * (context.rank == 0)).unbind())
