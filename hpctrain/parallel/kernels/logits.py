"""Softmax statistics of rows of logits, and gradients of losses that are functions of them.

The logits of a large vocabulary are the largest tensor of a step. torch makes several passes over a copy in
fp32; `functions.c` makes one over the products in their own dtype, and one more for the gradient.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True)
class SplitLogits:
    """Logits of this rank's columns: products times a multiplier, which a cap may bound.

    Attributes:
        products: Products [n, V/t] in the dtype of the weights, whose memory may be overwritten.
        columns: Number of columns that are not padding. Logits of padding are -inf.
        multiplier: Factor of the products.
        cap: Bound c of the logits x, which become c tanh(x / c); 0 for none.
    """

    products: Tensor
    columns: int
    multiplier: float = 1.0
    cap: float = 0.0


class SoftmaxStatistics:
    """Softmax statistics of the logits, in fp32 [n], by torch's operations.

    Args:
        logits: The logits.
        column: Column of one logit of each row, int64 [n]; negative for none.

    Attributes:
        maximum: Maximum of each row, at least the lowest finite number.
        total: Sum of the exponentials of the logits minus the maximum (the partition function).
        at_column: Logit at `column`, or -inf if that is negative.
    """

    maximum: Tensor
    total: Tensor
    at_column: Tensor

    def __init__(self, logits: SplitLogits, column: Tensor) -> None:
        self._logits, self._column = logits, column
        self._exponentials = torch.empty(0)
        self._slopes: Tensor | None = None
        self._compute()

    def _compute(self) -> None:
        logits, absent = self._logits, self._column < 0
        x = logits.products.float()
        if logits.multiplier != 1:
            x.mul_(logits.multiplier)
        if logits.cap:
            x.div_(logits.cap).tanh_()
            squares = x.square()
            self._slopes = torch.sub(x.new_ones(()), squares, out=squares)
            x.mul_(logits.cap)
        x[:, logits.columns :] = -torch.inf
        column = self._column.masked_fill(absent, 0).unsqueeze(1)
        self.at_column = x.gather(1, column).squeeze(1).masked_fill_(absent, -torch.inf)
        self.maximum = x.amax(1).clamp_min_(torch.finfo(torch.float32).min)
        self._exponentials = x.sub_(self.maximum.unsqueeze(1)).exp_()
        self.total = x.sum(1)

    def gradient(self, weight: Tensor, column_weight: Tensor) -> Tensor:
        """Return the gradient [n, V/t] of the products, in their memory. May be called once.

        The gradient of the logits is their exponentials, as in `total`, times `weight`, minus `column_weight`
        at the column.

        Args:
            weight: Factors [n] of the exponentials.
            column_weight: Values [n] that are subtracted at the column, zero where that is negative.
        """
        products, x = self._logits.products, self._exponentials
        x.mul_(weight.unsqueeze(1))
        x.scatter_add_(1, self._column.clamp_min(0).unsqueeze(1), -column_weight.unsqueeze(1))
        if self._slopes is not None:
            x.mul_(self._slopes)
        if self._logits.multiplier != 1:
            x.mul_(self._logits.multiplier)
        return x if x is products else products.copy_(x)


class CompiledSoftmaxStatistics(SoftmaxStatistics):
    """Softmax statistics by the compiled library, of products in fp32 or bf16.

    Args:
        logits: The logits.
        column: Column of one logit of each row, int64 [n]; negative for none.
        library: The library.
    """

    def __init__(self, logits: SplitLogits, column: Tensor, library: ctypes.CDLL) -> None:
        self._library, self._extreme = library, torch.empty(0)
        super().__init__(logits, column)

    def _compute(self) -> None:
        x, column = self._logits.products, self._column
        assert x.is_contiguous() and column.is_contiguous() and column.dtype == torch.int64
        self._extreme, self.total, self.at_column = torch.empty(3, len(x))
        results = self._extreme, self.total, self.at_column
        self._library.softmax_statistics(x, column, *results, *self._sizes())
        # Scale the maximum like each logit, so that the exponential of the largest one is exactly one.
        largest = self._extreme * abs(self._logits.multiplier)
        self.maximum = largest.clamp_min_(torch.finfo(torch.float32).min)

    @override
    def gradient(self, weight: Tensor, column_weight: Tensor) -> Tensor:
        x, weights = self._logits.products, (weight.contiguous(), column_weight.contiguous())
        assert all(each.dtype == torch.float32 for each in weights)
        self._library.softmax_gradient(x, self._column, self._extreme, *weights, *self._sizes())
        return x

    def _sizes(self) -> tuple[int, int, int, float, int]:
        logits, (rows, width) = self._logits, self._logits.products.shape
        return rows, logits.columns, width, logits.multiplier, logits.products.element_size()
