"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the objective of a model with modules.

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

from hpctrain.model.inputs import ModelInputs
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
        depths: Number of modules, at least 1.
        weight: Weight of the mean loss of all depths.
    """

    depths: int = 1
    weight: float = 0.3
    metrics: ClassVar[tuple[str, ...]] = ("loss", MTP_LOSS)

    @override
    def normalize(self, metrics: dict[str, float]) -> float:
        if not metrics[MTP_LOSS]:  # an evaluation, which does not compute the modules
            del metrics[MTP_LOSS]
        return 1.0

    @override
    def losses(self, inputs: ModelInputs, scale: Tensor) -> LossFunction:
        return _LossOfDepths(inputs, scale, self)


@dataclass(frozen=True)
class _LossOfDepths:
    """Loss function of a micro-batch: of all depths in training, and else of the next token alone."""

    inputs: ModelInputs
    scale: Tensor
    objective: MultiToken

    def __call__(self, head: VocabularyHead, hidden: Tensor) -> Losses:
        """Return the sums over this rank's tokens. Collective over the tensor group."""
        targets, z_loss = self.inputs.fields["targets"].t(), self.objective.z_loss
        if hidden.shape[1] == targets.shape[1]:
            total = CrossEntropy(targets, self.scale, z_loss)(head, hidden).total
            return Losses(total, (total.detach(), torch.zeros_like(total)))
        weight = self.objective.weight / self.objective.depths
        is_main = torch.ones_like(targets, dtype=torch.bool)
        is_main = functional.pad(is_main, (0, self.objective.depths * targets.shape[1])).flatten()
        scale = torch.where(is_main, self.scale, weight * self.scale)
        entropy = CrossEntropy(self._targets_of_depths(targets), scale, z_loss)
        further = torch.zeros((), dtype=torch.float32, device=hidden.device)

        def chunk_losses(
            logits: SplitLogits, rows: slice, needs_gradient: bool
        ) -> tuple[Tensor, Tensor | None]:
            losses, gradient = entropy.chunk_losses(head, logits, rows, needs_gradient)
            further.add_(losses.masked_fill(is_main[rows], 0.0).sum())
            return losses, gradient

        total = head(hidden, chunk_losses)
        return Losses(total, (total.detach() - further, further / self.objective.depths))

    def _targets_of_depths(self, targets: Tensor) -> Tensor:
        """Return the targets of all depths side by side, [s, (1 + depths) b].

        Nothing is predicted beyond the end of a sequence or, if attention stays within documents, of a
        document.
        """
        documents, found = self.inputs.documents, [targets]
        places = None if documents is None else documents.at(self.inputs.positions)
        for depth in range(1, self.objective.depths + 1):
            shifted = targets[depth:]
            if places is not None:
                shifted = shifted.masked_fill(places[depth:] < depth, -1)
            found.append(torch.cat((shifted, torch.full_like(targets[:depth], -1))))
        return torch.cat(found, 1)
