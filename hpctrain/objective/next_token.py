"""Next-token prediction: cross-entropy with z-loss, of logits that are split over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from hpctrain.data.batches import MicroBatch
from hpctrain.model.inputs import ModelInputs
from hpctrain.objective.objective import Losses, LossOf
from hpctrain.objective.token_sampling import TokenSampling
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.partition import SplitLogits
from hpctrain.parallel.shard import Parameter
from hpctrain.parallel.vocabulary import VocabularyHead


class SplitTable(Protocol):
    """A head whose matrix is split over the vocabulary: of a rank's rows the first `rows` are any."""

    @property
    def groups(self) -> LayerContext:
        """Over which it is split."""

    @property
    def table(self) -> Parameter:
        """This rank's rows of the matrix."""

    @property
    def rows(self) -> int:
        """Those that are no padding."""


@dataclass(frozen=True)
class NextToken:
    """The cross-entropy in nats. `z_loss` weighs the squared logarithm of the partition function (PaLM, arXiv
    2204.02311), in the gradient alone.
    """

    z_loss: float = 0.0
    figures: ClassVar[tuple[str, ...]] = ("loss",)

    def count(self, micro_batch: MicroBatch) -> int:
        """Tokens to be predicted."""
        return int((micro_batch.targets >= 0).sum())

    def settle(self, figures: dict[str, float]) -> float:  # noqa: ARG002
        """See Objective: the count is known before."""
        return 1.0

    def losses(self, inputs: ModelInputs, scale: Tensor) -> LossOf:
        """Return the function that computes the losses of a micro-batch."""
        return CrossEntropy(inputs.fields["targets"].t(), scale, self.z_loss)


@dataclass(frozen=True)
class CrossEntropy:
    """Of `targets` [s, b] int64, negative where nothing is to be predicted; see NextToken. `scale`, 0-dim or
    one a token [s * b], is the factor of the losses in the gradient. Chances are those of a `drawing`.
    """

    targets: Tensor
    scale: Tensor
    z_loss: float = 0.0
    drawing: TokenSampling | None = None

    def __call__(self, head: VocabularyHead, hidden: Tensor) -> Losses:
        """Sum over the rank's tokens; the gradients are those of `scale` times it, plus z-loss."""
        loss = head(hidden, partial(self.of_chunk, head, self.targets.reshape(-1)))
        return Losses(loss, (loss.detach(),))

    def of_chunk(
        self, head: SplitTable, targets: Tensor, logits: SplitLogits, rows: slice, learning: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See ChunkLoss, of `rows` of the targets."""
        targets = targets[rows]
        tensor, first = head.groups.tensor, head.table.shard.start[0]
        if self.drawing is not None:
            logits = self.drawing.of(logits, first)
        predicted = targets >= 0
        local = targets - first
        mine = predicted & (local >= 0) & (local < logits.columns)

        own = head.groups.functions.partition(logits, local.masked_fill(~mine, -1))
        maximum, total, at_target = own.maximum, own.total, own.at_column
        if tensor.size > 1:
            parts = tensor.all_gather(torch.stack((maximum, total, at_target)).unsqueeze(0))
            maximum = parts[:, 0].amax(0)
            total = (parts[:, 1] * (parts[:, 0] - maximum).exp()).sum(0)
            at_target = parts[:, 2].amax(0)
        log_partition = total.log() + maximum
        loss = (log_partition - at_target).masked_fill(~predicted, 0.0)
        if not learning:
            return loss, None
        weight = predicted * (self.scale[rows] if self.scale.dim() else self.scale)
        probability = (own.maximum - maximum).exp() / total * weight
        if self.z_loss:
            probability = probability * (1 + 2 * self.z_loss * log_partition)
        return loss, own.gradient(probability, mine * weight)
