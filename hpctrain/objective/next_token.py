"""Next-token prediction: cross-entropy with z-loss of logits that are split over the vocabulary.

Each tensor-parallel rank computes the logits of its rows of the vocabulary. Only three numbers per token are
exchanged: the maximum of a rank's logits, the sum of their exponentials relative to it, and the logit of the
target, on the rank that has it. Logits are computed chunk by chunk of tokens and never stored as a whole; the
gradient is computed together with the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.objective import Losses, LossFunction, Objective
from hpctrain.objective.token_sampling import TokenSampling
from hpctrain.parallel.kernels.logits import SplitLogits
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.vocabulary import VocabularyHead


class SplitVocabularyHead(Protocol):
    """Interface of a head whose matrix is split over the vocabulary."""

    @property
    def layer_context(self) -> LayerContext:
        """Groups of ranks, of which the tensor group splits the matrix."""

    @property
    def table(self) -> Parameter:
        """Rows of the matrix on this rank."""


@dataclass(frozen=True)
class NextToken(Objective):
    """Mean cross-entropy of the next token, in nats.

    Attributes:
        z_loss: Weight of the squared logarithm of the partition function (PaLM, arXiv 2204.02311). It is part
            of the gradient, but not of the reported loss.
    """

    z_loss: float = 0.0
    metrics: ClassVar[tuple[str, ...]] = ("loss",)

    @override
    def loss_function(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        return CrossEntropy(inputs.fields["targets"].t(), scale, self.z_loss)


@dataclass(frozen=True)
class CrossEntropy:
    """Loss function of a micro-batch: cross-entropy of split logits.

    Attributes:
        targets: Targets [seq, batch] int64, negative where nothing is predicted.
        scale: Factor of the losses in the gradient: 0-dim, or one per token [seq * batch].
        z_loss: As in NextToken.
        sampling: If given, distribution whose probabilities are used.
    """

    targets: Tensor
    scale: Tensor
    z_loss: float = 0.0
    sampling: TokenSampling | None = None

    @cached_property
    def flat_targets(self) -> Tensor:
        """Targets of all tokens, [seq * batch]."""
        return self.targets.reshape(-1)

    def __call__(self, head: VocabularyHead, hidden: Tensor) -> Losses:
        """Return the sum of losses over this rank's tokens. Collective over the tensor group.

        Its gradient is that of `scale` times the sum, plus that of the z-loss.
        """
        loss = head(hidden, partial(self.chunk_losses, head))
        return Losses(loss, (loss.detach(),))

    def chunk_losses(
        self, head: SplitVocabularyHead, logits: SplitLogits, rows: slice, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each token of a chunk, and the gradient of `logits.products`.

        The head calls it for one chunk after another. Collective over the tensor group.

        Args:
            head: Head whose matrix is split over the vocabulary.
            logits: This rank's columns of the chunk's logits [rows, columns].
            rows: Tokens of the chunk, as a range of `flat_targets`.
            needs_gradient: If False, the gradient is None.

        Returns:
            Losses, fp32 [rows], without `scale` and z-loss; 0 where nothing is predicted. The gradient is
            that of the sum of `scale` times each loss with its z-loss, with respect to `logits.products`, and
            is in their memory.
        """
        targets = self.flat_targets[rows]
        tensor, first = head.layer_context.tensor, head.table.shard.start[0]
        if self.sampling is not None:
            logits = self.sampling.adjust(logits, first)
        predicted = targets >= 0
        local = targets - first
        is_local = predicted & (local >= 0) & (local < logits.columns)

        local_sums = head.layer_context.functions.softmax_statistics(logits, local.masked_fill(~is_local, -1))
        maximum, total, at_target = local_sums.maximum, local_sums.total, local_sums.at_column
        if tensor.size > 1:
            parts = tensor.all_gather(torch.stack((maximum, total, at_target)).unsqueeze(0))
            maximum = parts[:, 0].amax(0)
            total = (parts[:, 1] * (parts[:, 0] - maximum).exp()).sum(0)
            at_target = parts[:, 2].amax(0)
        log_partition = total.log() + maximum
        loss = (log_partition - at_target).masked_fill(~predicted, 0.0)
        if not needs_gradient:
            return loss, None
        weight = predicted * (self.scale[rows] if self.scale.dim() else self.scale)
        probability = (local_sums.maximum - maximum).exp() / total * weight
        if self.z_loss:
            probability = probability * (1 + 2 * self.z_loss * log_partition)
        return loss, local_sums.gradient(probability, is_local * weight)
