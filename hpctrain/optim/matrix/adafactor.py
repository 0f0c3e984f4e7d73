"""Adafactor (arXiv 1804.04235): AdamW with factored second moments.

In place of the mean square of each element's gradients, a matrix [n, m] has the mean squares of its n rows
and of its m columns, which take n + m numbers. Their product, over the mean of all, approximates the full
matrix of mean squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.shards import Shard, UpdateBlock
from hpctrain.sharding.bucket_layout import ELEMENT_WORK
from hpctrain.sharding.state import MASTER

MEAN, ROW, COLUMN, SQUARE, UPDATES = "exp_avg", "row", "column", "exp_avg_sq", "updates"

_DECAY = -0.8
"""Update number t has the weight t to this power in the mean squares."""

_SMALLEST_SQUARE = 1e-30
"""Number that is added to squared gradients (epsilon 1 of the paper)."""
_LARGEST_UPDATE = 1.0
"""Root mean square of an update before the learning rate, above which it is scaled down."""


@dataclass(frozen=True)
class Adafactor:
    """Update rule with the mean squares of rows and columns.

    With gradient g and parameter p, update number t of a matrix is, with s = t^-0.8:

        R = (1 - s) R + s mean(g^2 + 1e-30)  for each row
        C = (1 - s) C + s mean(g^2 + 1e-30)  for each column
        V = R C / mean(R)
        u = g / sqrt(V),  u = u / max(1, rms(u))
        p = p (1 - rate weight_decay) - rate u

    A vector has V = (1 - s) V + s (g^2 + 1e-30). With momentum, M = momentum M + (1 - momentum) rate u is
    subtracted in place of rate u. The learning rate is that of the schedule, not the paper's relative step
    size. Each expert is a matrix of its own.

    Attributes:
        momentum: Decay of the mean of updates. With 0 there is none.
        weight_decay: Decoupled weight decay.
    """

    momentum: float
    weight_decay: float

    dtype = torch.float32

    def update_block(self, shard: Shard) -> UpdateBlock:
        """Return the part of a parameter whose elements are updated together, and the work of its update.

        It is a matrix, the last two dims, or a whole vector. Ranks that share the work of updates keep it
        whole, as they exchange the pieces of a block.
        """
        shape = (1,) * (len(shard.shape) - 2) + shard.shape[-2:]
        return UpdateBlock(shape, ELEMENT_WORK * prod(shape))

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        """Return the shape of a cell of each state, as `MatrixRule.cells` explains."""
        shape = shard.shape
        leading = (1,) * (len(shape) - 2)
        block = leading + shape[-2:]
        means: dict[str, Sequence[int] | None] = {MEAN: None} if self.momentum else {}
        if len(shape) < 2:
            return {**means, SQUARE: (1,) * len(shape), UPDATES: block}
        return {**means, ROW: (*leading, 1, shape[-1]), COLUMN: (*leading, shape[-2], 1), UPDATES: block}

    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        """Return a copy of the divided gradients of a piece of a block."""
        return part.gradients.div_(gradient_divisor).clone()

    def transform(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        """Return the updates of a whole block before the learning rate, and update its mean squares."""
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

    def apply(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None:
        """Update the weights of a piece of a block with its transformed directions."""
        part.decay_weights(learning_rate * self.weight_decay)
        weights, rate = part.state[MASTER], learning_rate * part.update_settings.learning_rate_factor
        if self.momentum:
            mean = part.state[MEAN].mul_(self.momentum).add_(directions, alpha=(1 - self.momentum) * rate)
            weights.sub_(mean)
        else:
            weights.sub_(directions, alpha=rate)


def _mean_square(values: Tensor, dim: int) -> Tensor:
    """Return the mean square along a dim, without a copy of the matrix."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=dim, keepdim=True)
    return norms.square_().div_(values.shape[dim]).add_(_SMALLEST_SQUARE)
