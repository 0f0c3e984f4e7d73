"""Number of real tokens in each row of a micro-batch: what follows them in the row is padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowLengths:
    """Numbers of real tokens at the beginning of the rows of a micro-batch.

    A row may hold several documents: only its end is padding. A row that holds no sample has length 0. Every
    rank that computes on the micro-batch knows the lengths of whole rows, whatever piece of them it has. They
    stay on the host, so that nothing waits for a device to learn how many tokens are real.

    Attributes:
        values: Length of each row, int64 [b].
    """

    values: Tensor

    @staticmethod
    def of_full_rows(samples: int, rows: int, length: int) -> RowLengths:
        """Return the lengths of `rows` rows, of which the first `samples` are full and the others empty."""
        values = torch.zeros(rows, dtype=torch.int64)
        values[:samples] = length
        return RowLengths(values)

    @cached_property
    def total(self) -> int:
        """Number of real tokens in all rows."""
        return int(self.values.sum())

    def padding_at(self, positions: Tensor) -> Tensor:
        """Return a bool tensor [n, b] on the device of `positions` [n]: True where a row has ended there."""
        lengths = self.values.to(positions.device, non_blocking=True)
        return positions.unsqueeze(1) >= lengths
