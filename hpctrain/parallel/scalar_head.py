"""Output layer with one number per token: the score of a reward model, the value of a critic.

Every tensor rank holds its only row. Under sequence parallelism each rank computes the scores of its piece of
the tokens, and all gather all scores. As in `VocabularyHead`, losses and gradients are computed in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, MatrixSize
from hpctrain.parallel.shards import Parameter, Shard, gradient_of

NAME = "score.weight"

LossAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function of scores [s, b] in fp32 that returns the sum of their losses and its gradient [s, b] in fp32."""


class ScalarHead(nn.Module):
    """Linear output layer [1, h] without a bias.

    Args:
        hidden: Features of a token, h.
        layer_context: Context of the layer.
        multiplier: Factor of the products, which gives the scores in fp32.
    """

    def __init__(self, hidden: int, layer_context: LayerContext, multiplier: float = 1.0) -> None:
        super().__init__()
        self.layer_context, self.multiplier = layer_context, multiplier
        self.table = Parameter(
            Shard.replicated(NAME, (1, hidden), layer_context.sequence_partial), initial="table"
        )

    def forward(self, hidden: Tensor, score_loss: LossAndGradient) -> Tensor:
        """Return the loss of all scores, fp32 0-dim. Collective over tensor ranks.

        The gradients are those that `score_loss` returns: the backward pass must start here with a gradient
        of one.

        Args:
            hidden: Hidden states [s or s/t, b, h].
            score_loss: Computes the loss.
        """
        loss: Tensor = _ScoreLossAutograd.apply(hidden, self, score_loss, torch.is_grad_enabled(), self.table)
        return loss

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the scores [s, b] of hidden states [s or s/t, b, h], without a graph. Collective."""
        with torch.no_grad():
            scores = _rows(hidden) @ self.table.detach()[0].float()
            scores = scores * self.multiplier if self.multiplier != 1 else scores
            return self.layer_context.gather_sequence(scores.view(hidden.shape[:-1]))

    @property
    def matrix(self) -> MatrixSize:
        """Global matrix that hidden states are multiplied with."""
        return MatrixSize(1, self.table.shard.shape[1], "whole")

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations: none that takes time."""
        return []


class _ScoreLossAutograd(torch.autograd.Function):
    """Loss of scores [s, b], whose gradient of the hidden states is computed in the forward pass.

    The forward pass also adds the gradient of the head's weight to its buffer. So the backward pass must
    start here, with a gradient of one.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, hidden: Tensor, head: ScalarHead, score_loss: LossAndGradient, training: bool, _: Tensor
    ) -> Tensor:
        table, layer_context = head.table, head.layer_context
        loss, gradient = score_loss(head.scores(hidden))
        ctx.head = head
        if not training:
            return loss.float()
        if layer_context.sequence_parallel:
            gradient = gradient.chunk(layer_context.tensor.size)[layer_context.tensor.rank]
        local = gradient.reshape(-1) * head.multiplier
        if table.requires_grad:
            buffer = gradient_of(table)
            buffer[0].add_((local @ _rows(hidden)).to(buffer.dtype))
        ctx.save_for_backward(torch.outer(local, table[0].float()).to(hidden.dtype).view_as(hidden))
        return loss.float()

    @staticmethod
    @override
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        head: ScalarHead = ctx.head
        (gradient,) = ctx.saved_tensors
        if head.table.requires_grad:
            head.table.mark_gradient_added()
        return gradient, None, None, None, None


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1]).float()
