"""The partition function of rows of logits, and what losses that are functions of it have for a gradient.

Logits of a large vocabulary are the largest tensor of a step: torch computes these as passes over a copy in
fp32, `functions.c` as one over the products as stored, and one more for the gradient.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True)
class SplitLogits:
    """Logits [n, V/t] are `products`, as stored, times `multiplier`, of the first `columns`; the others, if
    there are any, fill them up, and are logits of -inf. The memory of the products may be used.
    """

    products: Tensor
    columns: int
    multiplier: float = 1.0


class Partition:
    """Of the logits, in fp32 [n]: their `maximum`, at the least the lowest finite number, so that it may be
    subtracted where there are none; `total`, the sum of exponentials of what they are less than that;
    `at_column`, the one at `column` [n] int64, or -inf where that is negative. By torch's operations.
    """

    maximum: Tensor
    total: Tensor
    at_column: Tensor

    def __init__(self, logits: SplitLogits, column: Tensor) -> None:
        self._logits, self._column = logits, column
        self._exponentials = torch.empty(0)
        self._compute()

    def _compute(self) -> None:
        logits, absent = self._logits, self._column < 0
        x = logits.products.float()
        if logits.multiplier != 1:
            x.mul_(logits.multiplier)
        x[:, logits.columns :] = -torch.inf
        there = self._column.masked_fill(absent, 0).unsqueeze(1)
        self.at_column = x.gather(1, there).squeeze(1).masked_fill_(absent, -torch.inf)
        self.maximum = x.amax(1).clamp_min_(torch.finfo(torch.float32).min)
        self._exponentials = x.sub_(self.maximum.unsqueeze(1)).exp_()
        self.total = x.sum(1)

    def gradient(self, weight: Tensor, of_column: Tensor) -> Tensor:
        """[n, V/t] in the memory of the products, by these, of what by the logits has a gradient of their
        exponentials, as `total` adds them, times `weight` [n], less `of_column` [n] at the column, which
        is nought where that is negative. Once.
        """
        products, x = self._logits.products, self._exponentials
        x.mul_(weight.unsqueeze(1))
        x.scatter_add_(1, self._column.clamp_min(0).unsqueeze(1), -of_column.unsqueeze(1))
        if self._logits.multiplier != 1:
            x.mul_(self._logits.multiplier)
        return x if x is products else products.copy_(x)


class CompiledPartition(Partition):
    """By `call`, which calls a function of the library, of products in fp32 or bf16."""

    def __init__(self, logits: SplitLogits, column: Tensor, call: Callable[..., None]) -> None:
        self._call, self._extreme = call, torch.empty(0)
        super().__init__(logits, column)

    def _compute(self) -> None:
        x, column = self._logits.products, self._column
        assert x.is_contiguous() and column.is_contiguous() and column.dtype == torch.int64
        self._extreme, self.total, self.at_column = torch.empty(3, len(x))
        self._call("partition", x, column, self._extreme, self.total, self.at_column, *self._sizes())
        # Scaled after the exponentials were taken: the largest one's is to be one, however it rounds.
        largest = self._extreme * abs(self._logits.multiplier)
        self.maximum = largest.clamp_min_(torch.finfo(torch.float32).min)

    @override
    def gradient(self, weight: Tensor, of_column: Tensor) -> Tensor:
        x, weights = self._logits.products, (weight.contiguous(), of_column.contiguous())
        assert all(each.dtype == torch.float32 for each in weights)
        self._call("partition_gradient", x, self._column, self._extreme, *weights, *self._sizes())
        return x

    def _sizes(self) -> tuple[int, int, int, float, object]:
        logits = self._logits
        size = ctypes.c_int(logits.products.element_size())
        return *logits.products.shape[:1], logits.columns, logits.products.shape[1], logits.multiplier, size
