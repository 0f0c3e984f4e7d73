"""Number of real tokens in each row of a micro-batch; the rest of each row is padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hpctrain.host.streams import start_copy


@dataclass(frozen=True)
class RowLengths:
    """Number of real tokens at the beginning of each row of a micro-batch.

    A row may hold several documents; only its end is padding. A row without a sample has length 0. Every rank
    that computes on the micro-batch has the lengths of the complete rows, also if context parallelism gives
    it only a piece of each. They are on the host, so reading them does not wait for a device.

    Attributes:
        values: Length of each row, int64 [b].
    """

    values: Tensor

    @staticmethod
    def of_full_rows(samples: int, rows: int, length: int) -> RowLengths:
        """Return the lengths of `rows` rows: the first `samples` have `length` tokens, the rest none."""
        values = torch.zeros(rows, dtype=torch.int64)
        values[:samples] = length
        return RowLengths(values)

    @cached_property
    def total(self) -> int:
        """Number of real tokens in all rows."""
        return int(self.values.sum())

    def padding_at(self, positions: Tensor) -> Tensor:
        """Return a mask that is True at padding, bool [n, b] on the device of `positions` (int64 [n])."""
        return positions.unsqueeze(1) >= self.on(positions.device)

    def on(self, device: torch.device) -> Tensor:
        """Return the lengths, int64 [b], on a device, without waiting for it."""
        return start_copy(self.values, device)
