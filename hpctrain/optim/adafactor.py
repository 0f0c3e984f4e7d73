"""Adafactor (arXiv 1804.04235): squares of gradients kept as means of a matrix's rows and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.shard import Shard, UpdateBlock
from hpctrain.sharding.state import MASTER

MEAN, ROW, COLUMN, SQUARE, UPDATES = "exp_avg", "row", "column", "exp_avg_sq", "updates"

_WORK = 64.0
"""FLOPs that make as long as the update of one element."""

_DECAY = -0.8
"""The t-th update of a parameter has the share t to this power in the means of squares."""

_SMALLEST_SQUARE = 1e-30
_LARGEST_UPDATE = 1.0
"""Root of the mean square of what is multiplied by the rate, above which it is scaled down."""


@dataclass(frozen=True)
class Adafactor:
    """In the t-th update, with s = t^-0.8, of a matrix R = (1 - s) R + s mean(g^2 + 1e-30) of each row, C the
    same of each column, V = R C / mean(R); of a vector V = (1 - s) V + s (g^2 + 1e-30). Then u = g / sqrt(V),
    u = u / max(1, rms(u)), and p = p (1 - rate decay) - rate u, or with `momentum` M = momentum M +
    (1 - momentum) rate u, and p less that.

    The rate is that of the schedule: the paper's relative step sizes, times a parameter's own size, would
    take its place. Experts have rows and columns each.
    """

    momentum: float
    weight_decay: float

    format = torch.float32

    def block(self, shard: Shard) -> UpdateBlock:
        """See MatrixRule: whole matrices, or each of those that are stacked, and whole vectors."""
        shape = (1,) * (len(shard.shape) - 2) + shard.shape[-2:]
        return UpdateBlock(shape, _WORK * prod(shape))

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        """Return the names and shapes of the optimizer state of a parameter other than its master weights."""
        shape = shard.shape
        leading, whole = (1,) * (len(shape) - 2), (1,) * (len(shape) - 2) + shape[-2:]
        means: dict[str, Sequence[int] | None] = {MEAN: None} if self.momentum else {}
        if len(shape) < 2:
            return {**means, SQUARE: (1,) * len(shape), UPDATES: whole}
        return {
            **means,
            ROW: (*leading, 1, shape[-1]),
            COLUMN: (*leading, shape[-2], 1),
            UPDATES: whole,
        }

    def working_bytes(self, shape: Sequence[int]) -> int:
        """See MatrixRule: of a number for each row and column, those of the last update and what scales."""
        return 4 * 4 * sum(shape[-2:])

    @torch.no_grad()
    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        """Return the divided gradients of a piece of a block, and update the state of its elements."""
        return part.gradients.div_(gradient_divisor).clone()

    @torch.no_grad()
    def transformed(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        """See MatrixRule: updates before the rate."""
        count = cells[UPDATES].add_(1).reshape(())
        share = count.double().pow(_DECAY).float()
        if SQUARE in cells:
            square = directions.square().add_(_SMALLEST_SQUARE)
            directions.mul_(cells[SQUARE].lerp_(square, share).rsqrt())
        else:
            rows = cells[ROW].lerp_(_mean_square(directions, -1), share)
            columns = cells[COLUMN].lerp_(_mean_square(directions, -2), share)
            directions.mul_((rows / rows.mean()).rsqrt_()).mul_(columns.rsqrt())
        size = torch.linalg.vector_norm(directions) / sqrt(directions.numel())
        return directions.div_((size / _LARGEST_UPDATE).clamp_(min=1.0))

    @torch.no_grad()
    def follow(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None:
        """Update the weights of a piece of a block with its transformed directions."""
        weights, treatment = part.state[MASTER], part.treatment
        if treatment.decayed and self.weight_decay:
            weights.mul_(1 - learning_rate * self.weight_decay)
        rate = learning_rate * treatment.rate
        if self.momentum:
            mean = part.state[MEAN].mul_(self.momentum).add_(directions, alpha=(1 - self.momentum) * rate)
            weights.sub_(mean)
        else:
            weights.sub_(directions, alpha=rate)


def _mean_square(values: Tensor, dim: int) -> Tensor:
    """Of each row or column, without a copy of all."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=dim, keepdim=True)
    return norms.square_().div_(values.shape[dim]).add_(_SMALLEST_SQUARE)
