"""Adam-mini (arXiv 2406.16793): AdamW with one mean of squares for many elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.shard import Shard, UpdateBlock
from hpctrain.sharding.state import MASTER

MEAN, SQUARE = "exp_avg", "exp_avg_sq"

_WORK = 64.0
"""FLOPs that make as long as the update of one element."""

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class AdamMini:
    """AdamW, with b1, b2 the `betas`, whose v is one of a cell of elements: v = b2 v + (1 - b2) mean(g^2).

    Cells are the dense blocks of the second derivatives, as the paper divides Transformers: a head of queries
    or keys (`Shard.unit`), else a row, which makes one output of values, output projections and feed-forward
    parts, and is one token of embedding and head. Norms and biases are a cell each.
    """

    betas: tuple[float, float]
    epsilon: float
    weight_decay: float

    format = torch.float32

    def block(self, shard: Shard) -> UpdateBlock:
        """See MatrixRule: as many rows as a rank holds, where all hold as many; experts one by one."""
        if len(shard.shape) < 2:
            return UpdateBlock(shard.shape, _WORK * prod(shard.shape))
        *leading, rows, columns = shard.shape
        local = shard.local[-2]
        if shard.local[-1] == columns and rows % local == 0 and local % shard.unit == 0:
            rows = local
        return UpdateBlock((1,) * len(leading) + (rows, columns), _WORK * rows * columns)

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        """Return the names and shapes of the optimizer state of a parameter other than its master weights."""
        shape = shard.shape
        cell = (1,) * (len(shape) - 2) + ((shard.unit, shape[-1]) if len(shape) > 1 else shape)
        return {MEAN: None, SQUARE: cell}

    def working_bytes(self, shape: Sequence[int]) -> int:
        """See MatrixRule: a number for each row, and those that are added to it."""
        return 4 * 3 * prod(shape[:-1])

    @torch.no_grad()
    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        """Return the divided gradients of a piece of a block, and update the state of its elements."""
        gradients = part.gradients.div_(gradient_divisor)
        part.state[MEAN].mul_(self.betas[0]).add_(gradients, alpha=1 - self.betas[0])
        return gradients.clone()

    @torch.no_grad()
    def transformed(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        """See MatrixRule: of each element the root of its cell's mean of squares."""
        square = cells[SQUARE].view(-1, 1)
        by_cell = directions.view(square.numel(), -1)
        means = torch.linalg.vector_norm(by_cell, dim=-1, keepdim=True).square_().div_(by_cell.shape[-1])
        square.mul_(self.betas[1]).add_(means, alpha=1 - self.betas[1])
        by_cell.copy_(square.sqrt())
        return directions

    @torch.no_grad()
    def follow(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None:
        """Update the weights of a piece of a block with its transformed directions."""
        weights, treatment, count = part.state[MASTER], part.treatment, part.updates.double() + 1
        first, second = (1 - beta**count for beta in self.betas)
        if treatment.decayed and self.weight_decay:
            weights.mul_(1 - learning_rate * self.weight_decay)
        size = directions.div_(second.sqrt()).add_(max(self.epsilon, _SMALLEST)).mul_(first)
        weights.addcdiv_(part.state[MEAN], size, value=-learning_rate * treatment.rate)
