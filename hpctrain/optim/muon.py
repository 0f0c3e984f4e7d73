"""Muon: momentum whose matrices are made nearly orthogonal (https://kellerjordan.github.io/posts/muon).

To the bits of torch.optim.Muon on a matrix that has no pieces; experts one by one. What is not a matrix is
updated by another rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor

from hpctrain.host.device import on_host
from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.shard import Shard, UpdateBlock
from hpctrain.sharding.state import MASTER

MOMENTUM = "momentum"

Match = Literal["original", "adamw-rms"]
"""By what a matrix's steps are multiplied, of n rows and m columns: sqrt(max(1, n / m)), or what gives them
the size of AdamW's, 0.2 sqrt(max(n, m)) (Moonlight, arXiv 2502.16982)."""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7

_ROWS = 192
"""Rows of a symmetric product that a CPU computes at a time, fewer than which are slow."""


@dataclass(frozen=True)
class Muon:
    """m = momentum m + (1 - momentum) g; p = p (1 - rate decay) - rate scale orthogonal(m, or with `nesterov`
    momentum m + (1 - momentum) g), in `steps` iterations of Newton and Schulz in `format`.
    """

    momentum: float
    nesterov: bool
    weight_decay: float
    steps: int
    format: torch.dtype
    match: Match

    def block(self, shard: Shard) -> UpdateBlock | None:
        """See MatrixRule: matrices, or each of those that are stacked."""
        if len(shard.shape) < 2:
            return None
        rows, columns = sorted(shard.shape[-2:])
        products = 2.0 * rows * rows * (2 * columns + rows)
        return UpdateBlock((1,) * (len(shard.shape) - 2) + shard.shape[-2:], self.steps * products)

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:  # noqa: ARG002
        """Return the names and shapes of the optimizer state of a parameter other than its master weights."""
        return {MOMENTUM: None}

    def working_bytes(self, shape: Sequence[int]) -> int:
        """See MatrixRule: the other of two iterates, and two symmetric products."""
        return (prod(shape) + 2 * min(shape[-2:]) ** 2) * self.format.itemsize

    @torch.no_grad()
    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        """Return the direction of a piece of a block, in its shape, and update the state of its elements."""
        gradients = part.gradients.div_(gradient_divisor)
        momentum = part.state[MOMENTUM].lerp_(gradients, 1 - self.momentum)
        return gradients.lerp(momentum, self.momentum) if self.nesterov else momentum.clone()

    @torch.no_grad()
    def transformed(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Return the transformed directions of a whole block, and update the state of its cells."""
        return orthogonalized(directions.view(directions.shape[-2:]), self.steps).view(directions.shape)

    @torch.no_grad()
    def follow(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None:
        """Update the weights of a piece of a block with its transformed directions."""
        assert part.shard is not None
        weights, treatment = part.state[MASTER], part.treatment
        if treatment.decayed:
            weights.mul_(1 - learning_rate * self.weight_decay)
        rows, columns = part.shard.shape[-2:]
        scale = sqrt(max(1.0, rows / columns)) if self.match == "original" else 0.2 * sqrt(max(rows, columns))
        weights.add_(directions, alpha=-learning_rate * treatment.rate * scale)


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """About the nearest matrix whose rows, or if fewer columns, are orthonormal, in the format of the
    `matrix`, which is overwritten: its singular values come to lie between 0.5 and 1.5.

    X = X / |X|, then X = a X + (b A + c A A) X with A = X X^T, of fewer rows than columns.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x.div_(x.norm().clamp(min=_EPSILON))
    a, b, c = _COEFFICIENTS
    rows, columns = x.shape
    gram, polynomial = x.new_empty(rows, rows), x.new_empty(rows, rows)
    free, here = matrix.view(-1).view(rows, columns), x.new_empty(rows, columns)
    for _ in range(steps):
        _symmetric(gram, x, x.t())
        _symmetric(polynomial, gram, gram, b, c)
        torch.addmm(x, polynomial, x, beta=a, out=here)
        x, here, free = here, free, here
    return x.t().contiguous() if tall else x


def _symmetric(result: Tensor, one: Tensor, other: Tensor, beta: float = 0.0, alpha: float = 1.0) -> None:
    """beta one + alpha one other, or the product alone with beta 0, of which it is known to be symmetric.

    A CPU computes the lower blocks alone, whose bits are those of all at once.
    """
    for part, columns in _lower(result):
        into = result[part, :columns]
        if beta:
            torch.addmm(one[part, :columns], one[part], other[:, :columns], beta=beta, alpha=alpha, out=into)
        else:
            torch.mm(one[part], other[:, :columns], out=into)
    for part, _ in _lower(result):
        result[: part.start, part] = result[part, : part.start].t()


def _lower(result: Tensor) -> Iterator[tuple[slice, int]]:
    """Rows of a square matrix, and how many columns they have up to its diagonal and the block there."""
    rows = result.shape[0]
    parts = max(1, rows // _ROWS) if on_host(result.device) else 1
    for first, last in pairwise(rows * part // parts for part in range(parts + 1)):
        yield slice(first, last), last
