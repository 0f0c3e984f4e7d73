"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): objective of a model with MTP modules.

The module of depth k predicts the token k + 1 positions ahead. The loss is that of the next token plus
weight / d times the sum of the losses of all d depths, all divided by the number of next tokens to predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from hpctrain.data.batches import MASKED, MicroBatch
from hpctrain.model.inputs import ModelInputs, field_ahead
from hpctrain.objective.next_token import CrossEntropy, NextToken
from hpctrain.objective.objective import Losses, LossFunction
from hpctrain.parallel.kernels.logits import SplitLogits
from hpctrain.parallel.vocabulary import VocabularyHead

MTP_LOSS = "mtp_loss"
"""Metric of training: mean of the losses of all depths."""


@dataclass(frozen=True)
class MultiToken(NextToken):
    """Mean cross-entropy of the next token, and in training also that of tokens further ahead, in nats.

    Attributes:
        depths: Number of MTP modules, at least 1.
        weight: Weight of the mean loss of all depths.
    """

    depths: int = 1
    weight: float = 0.3
    metrics: ClassVar[tuple[str, ...]] = ("loss", MTP_LOSS)

    @override
    def normalize(self, metrics: dict[str, float]) -> float:
        if not metrics[MTP_LOSS]:  # an evaluation, which does not run the MTP modules
            del metrics[MTP_LOSS]
        return 1.0

    @override
    def fields_of(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Return the fields of the micro-batch, and the tokens and targets that follow, for each depth.

        Nothing is predicted beyond the end of a sequence or, if attention stays within documents, of a
        document.
        """
        fields = dict(micro_batch.fields)
        tokens, targets, documents = fields["tokens"], fields["targets"], micro_batch.documents
        for depth in range(1, self.depths + 1):
            further = targets[:, depth:]
            if documents is not None:
                further = further.masked_fill(documents.places[:, depth:] < depth, MASKED)
            fields[field_ahead("tokens", depth)] = functional.pad(tokens[:, depth:], (0, depth))
            fields[field_ahead("targets", depth)] = functional.pad(further, (0, depth), value=MASKED)
        return fields

    @override
    def loss_function(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        return _LossOfDepths(inputs, scale, self)


@dataclass(frozen=True)
class _LossOfDepths:
    """Loss function of a micro-batch: for all depths in training, otherwise for the next token only."""

    inputs: ModelInputs
    scale: Tensor
    objective: MultiToken

    def __call__(self, head: VocabularyHead, hidden: Tensor) -> Losses:
        """Return the sums over this rank's tokens. Collective over the tensor group."""
        fields, z_loss, depths = self.inputs.fields, self.objective.z_loss, self.objective.depths
        targets = fields["targets"].t()
        if hidden.shape[1] == targets.shape[1]:
            total = CrossEntropy(targets, self.scale, z_loss)(head, hidden).total
            return Losses(total, (total.detach(), torch.zeros_like(total)))
        weight = self.objective.weight / depths
        is_main = torch.ones_like(targets, dtype=torch.bool)
        is_main = functional.pad(is_main, (0, depths * targets.shape[1])).flatten()
        scale = torch.where(is_main, self.scale, weight * self.scale)
        further_targets = (fields[field_ahead("targets", depth)].t() for depth in range(1, depths + 1))
        entropy = CrossEntropy(torch.cat((targets, *further_targets), 1), scale, z_loss)
        further = torch.zeros((), dtype=torch.float32, device=hidden.device)

        def chunk_losses(
            logits: SplitLogits, rows: slice, needs_gradient: bool
        ) -> tuple[Tensor, Tensor | None]:
            losses, gradient = entropy.chunk_losses(head, logits, rows, needs_gradient)
            further.add_(losses.masked_fill(is_main[rows], 0.0).sum())
            return losses, gradient

        total = head(hidden, chunk_losses)
        return Losses(total, (total.detach() - further, further / depths))
