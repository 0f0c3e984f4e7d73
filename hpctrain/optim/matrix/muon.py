"""Muon: momentum whose matrices are made nearly orthogonal (https://kellerjordan.github.io/posts/muon).

The momentum M of a matrix has few large singular values, so a step along M changes few directions. Muon
replaces M by the nearest matrix with orthonormal rows (or columns), whose singular values are all 1. It
approximates that by five iterations of Newton and Schulz, which consist of matrix products only and are
exact enough in bf16.

This needs the whole matrix. `optim/matrix/__init__.py` explains how matrices are distributed among ranks.
Each expert is a matrix of its own. Parameters that are not matrices are updated by another rule
(`MatrixRules`). If tensor ranks do not split a matrix, its update has the bits of `torch.optim.Muon`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from hpctrain.host.device import on_host
from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.shards import Shard, UpdateBlock
from hpctrain.sharding.state import MASTER

MOMENTUM = "momentum"

LearningRateMatch = Literal["original", "adamw-rms"]
"""Factor of the learning rate of a matrix with n rows and m columns.

It is sqrt(max(1, n / m)), or 0.2 sqrt(max(n, m)), which gives updates the RMS of AdamW's (Moonlight, arXiv
2502.16982).
"""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b and c of the iteration."""

_EPSILON = 1e-7

_ROWS = 192
"""Rows of a symmetric product that a CPU computes at a time. Fewer rows are slow."""


@dataclass(frozen=True)
class Muon:
    """Update rule of matrices: orthogonalized momentum.

    With gradient g, momentum m and parameter p:

        m = momentum m + (1 - momentum) g
        u = momentum m + (1 - momentum) g if nesterov else m
        p = p (1 - rate weight_decay) - rate scale orthogonalize(u)

    Attributes:
        momentum: Decay of the momentum.
        nesterov: True for Nesterov momentum.
        weight_decay: Decoupled weight decay.
        steps: Number of Newton-Schulz iterations.
        dtype: Format of these iterations, and of the directions that ranks send each other.
        match: Choice of `scale`.
    """

    momentum: float
    nesterov: bool
    weight_decay: float
    steps: int
    dtype: torch.dtype
    match: LearningRateMatch

    def update_block(self, shard: Shard) -> UpdateBlock | None:
        """Return the last two dims as the block; None for vectors."""
        if len(shard.shape) < 2:
            return None
        rows, columns = sorted(shard.shape[-2:])
        products = 2.0 * rows * rows * (2 * columns + rows)
        return UpdateBlock((1,) * (len(shard.shape) - 2) + shard.shape[-2:], self.steps * products)

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:  # noqa: ARG002
        """Return the shape of a cell of each state, as `MatrixRule.cells` explains."""
        return {MOMENTUM: None}

    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        """Return the direction of a piece of a block, in its shape, and update the state of its elements."""
        gradients = part.gradients.div_(gradient_divisor)
        momentum = part.state[MOMENTUM].lerp_(gradients, 1 - self.momentum)
        return gradients.lerp(momentum, self.momentum) if self.nesterov else momentum.clone()

    def transform(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Return the orthogonalized directions of a whole matrix. Muon has no state of cells."""
        return orthogonalize(directions.view(directions.shape[-2:]), self.steps).view(directions.shape)

    def apply(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None:
        """Update the weights of a piece of a matrix with its transformed directions, after weight decay."""
        assert part.shard is not None
        part.decay_weights(learning_rate * self.weight_decay)
        rows, columns = part.shard.shape[-2:]
        scale = sqrt(max(1.0, rows / columns)) if self.match == "original" else 0.2 * sqrt(max(rows, columns))
        part.state[MASTER].add_(
            directions, alpha=-learning_rate * part.update_settings.learning_rate_factor * scale
        )


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return about the nearest matrix with orthonormal rows, or columns if there are fewer columns.

    The result is X after `steps` iterations of X = a X + (b A + c A A) X with A = X X^T, which start with
    X = matrix / |matrix|, transposed if it has more rows than columns. Its singular values are between 0.5
    and 1.5.

    Args:
        matrix: The matrix [rows, columns], which is overwritten.
        steps: Number of iterations.

    Returns:
        A matrix of the same shape and dtype.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x.div_(x.norm().clamp(min=_EPSILON))
    a, b, c = _COEFFICIENTS
    rows, columns = x.shape
    gram, polynomial = x.new_empty(rows, rows), x.new_empty(rows, rows)
    spare, result = matrix.view(-1).view(rows, columns), x.new_empty(rows, columns)
    for _ in range(steps):
        _symmetric_product(gram, x, x.t())
        _symmetric_product(polynomial, gram, gram, b, c)
        torch.addmm(x, polynomial, x, beta=a, out=result)
        x, result, spare = result, spare, result
    return x.t().contiguous() if tall else x


def _symmetric_product(
    result: Tensor, left: Tensor, right: Tensor, beta: float = 0.0, alpha: float = 1.0
) -> None:
    """Compute `beta left + alpha left @ right`, or with beta 0 the product alone, which has to be symmetric.

    A CPU only computes the blocks on and below the diagonal, to the bits of the whole product.
    """
    for rows, columns in _lower_blocks(result):
        target = result[rows, :columns]
        if beta:
            torch.addmm(
                left[rows, :columns], left[rows], right[:, :columns], beta=beta, alpha=alpha, out=target
            )
        else:
            torch.mm(left[rows], right[:, :columns], out=target)
    for rows, _ in _lower_blocks(result):
        result[: rows.start, rows] = result[rows, : rows.start].t()


def _lower_blocks(result: Tensor) -> Iterator[tuple[slice, int]]:
    """Yield blocks of rows of a square matrix, and the number of their columns up to the diagonal block."""
    rows = result.shape[0]
    parts = max(1, rows // _ROWS) if on_host(result.device) else 1
    for first, last in pairwise(rows * part // parts for part in range(parts + 1)):
        yield slice(first, last), last
