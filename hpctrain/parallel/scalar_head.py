"""A head that gives one number a token: the score of a reward model, the value of a critic.

Every rank of the tensor axis has all of its one row; under sequence parallelism each computes the scores of
its part of the tokens, and all have all scores. As of logits, losses and their gradients are computed in one
pass, so that backward needs no parameter of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, MatrixSize
from hpctrain.parallel.shards import Parameter, Shard

NAME = "score.weight"

ScoreLoss = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Of scores [s, b] in fp32: the sum of their losses, and its gradient by them, as large, fp32."""


class ScalarHead(nn.Module):
    """A linear head [1, h] without a bias. Scores are the products times `multiplier`, in fp32."""

    def __init__(self, hidden: int, groups: LayerContext, multiplier: float = 1.0) -> None:
        super().__init__()
        self.groups, self.multiplier = groups, multiplier
        self.table = Parameter(Shard.whole(NAME, (1, hidden), groups.sequence_partial), initial="table")

    def forward(self, hidden: Tensor, of_scores: ScoreLoss) -> Tensor:
        """The loss that `of_scores` finds of hidden [s or s/t, b, h], fp32 0-dim.

        The gradients are those that it gives: start backward here with a gradient of one.
        """
        loss: Tensor = _ScoreLossAutograd.apply(hidden, self, of_scores, torch.is_grad_enabled(), self.table)
        return loss

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores [s, b] of hidden [s or s/t, b, h], without a gradient."""
        with torch.no_grad():
            return self.groups.gathered(self._of(self._rows(hidden)).view(hidden.shape[:-1]))

    @property
    def matrix(self) -> MatrixSize:
        """What hidden states are multiplied with."""
        return MatrixSize(1, self.table.shard.shape[1], "whole")

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """What is done besides: next to nothing."""
        return []

    def saved(self, at: ActivationSizes) -> SavedStorage:
        """The gradient of the hidden states, of the rank's own tokens."""
        return at.row_features(self.table.shard.shape[1])

    def workspace(self, at: ActivationSizes) -> int:
        """Bytes of a loss in passing: scores and their gradients, and in 16 bits hidden states in fp32."""
        wide = 4 * at.rows * self.table.shard.shape[1] if at.itemsize < 4 else 0
        return wide + 3 * 4 * at.tokens

    def _rows(self, hidden: Tensor) -> Tensor:
        return hidden.reshape(-1, hidden.shape[-1]).float()

    def _of(self, rows: Tensor) -> Tensor:
        scores = rows @ self.table.detach()[0].float()
        return scores * self.multiplier if self.multiplier != 1 else scores


class _ScoreLossAutograd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: ScalarHead, of_scores: ScoreLoss, learning: bool, _: Tensor
    ) -> Tensor:
        table, groups = head.table, head.groups
        loss, gradient = of_scores(head.scores(hidden))
        ctx.head = head
        if not learning:
            return loss.float()
        if groups.sequence_parallel:
            gradient = gradient.chunk(groups.tensor.size)[groups.tensor.rank]
        own = gradient.reshape(-1) * head.multiplier
        if table.requires_grad:
            buffer = table.gradient
            assert buffer is not None
            buffer[0].add_((own @ head._rows(hidden)).to(buffer.dtype))
        ctx.save_for_backward(torch.outer(own, table[0].float()).to(hidden.dtype).view_as(hidden))
        return loss.float()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        head: ScalarHead = ctx.head
        (gradient,) = ctx.saved_tensors
        if head.table.requires_grad:
            head.table.added()
        return gradient, None, None, None, None
