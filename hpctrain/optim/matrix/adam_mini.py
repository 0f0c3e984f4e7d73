"""Adam-mini (arXiv 2406.16793): AdamW with one second moment for many elements.

The paper observes that the Hessian of a Transformer is nearly block-diagonal, and that one learning rate for
each block is enough. So the second moment has one number for each block in place of one for each element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.shards import Shard, UpdateBlock
from hpctrain.sharding.bucket_layout import ELEMENT_WORK
from hpctrain.sharding.state import MASTER

MEAN, SQUARE = "exp_avg", "exp_avg_sq"

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class AdamMini:
    """AdamW with one second moment for each cell of elements: v = b2 v + (1 - b2) mean(g^2).

    Cells are those of the paper: one head of the query and key matrices (`Shard.unit`), one row of all other
    matrices (one output of values, projections and feed-forward layers; one token of the embedding and the
    output layer), and a whole norm or bias.

    Attributes:
        betas: Decays b1 and b2 of the first and the second moment.
        epsilon: Number that is added to the root of the second moment.
        weight_decay: Decoupled weight decay.
    """

    betas: tuple[float, float]
    epsilon: float
    weight_decay: float

    dtype = torch.float32

    def update_block(self, shard: Shard) -> UpdateBlock:
        """Return the rows that are updated together, with the work of their update.

        If all ranks have the same number of rows, in whole cells, these are the rows of one rank. Its update
        then needs no rows of other ranks. Otherwise they are all rows.
        """
        if len(shard.shape) < 2:
            return UpdateBlock(shard.shape, ELEMENT_WORK * prod(shard.shape))
        *leading, rows, columns = shard.shape
        local = shard.local[-2]
        is_even = shard.unpadded_local is None and rows % local == 0
        if shard.local[-1] == columns and is_even and local % shard.unit == 0:
            rows = local
        return UpdateBlock((1,) * len(leading) + (rows, columns), ELEMENT_WORK * rows * columns)

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        """Return the shape of a cell of each state, as `MatrixRule.cells` explains."""
        shape = shard.shape
        cell = (1,) * (len(shape) - 2) + ((shard.unit, shape[-1]) if len(shape) > 1 else shape)
        return {MEAN: None, SQUARE: cell}

    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        """Return a copy of the divided gradients of a piece of a block, and update its first moment."""
        gradients = part.gradients.div_(gradient_divisor)
        part.state[MEAN].mul_(self.betas[0]).add_(gradients, alpha=1 - self.betas[0])
        return gradients.clone()

    def transform(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        """Return the root of the second moment of each element's cell, in the shape of the block."""
        square = cells[SQUARE].view(-1, 1)
        by_cell = directions.view(square.numel(), -1)
        means = torch.linalg.vector_norm(by_cell, dim=-1, keepdim=True).square_().div_(by_cell.shape[-1])
        square.mul_(self.betas[1]).add_(means, alpha=1 - self.betas[1])
        by_cell.copy_(square.sqrt())
        return directions

    def apply(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None:
        """Update the weights of a piece of a block with its transformed directions."""
        part.decay_weights(learning_rate * self.weight_decay)
        count, rate = part.updates.double() + 1, learning_rate * part.update_settings.learning_rate_factor
        first, second = (1 - beta**count for beta in self.betas)
        size = directions.div_(second.sqrt()).add_(max(self.epsilon, _SMALLEST)).mul_(first)
        part.state[MASTER].addcdiv_(part.state[MEAN], size, value=-rate)
