"""Memory that flat buffers take turns in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Pool:
    """Flat buffers that are handed out, given back and handed out again.

    `empty` makes new memory of a shape and type where no free buffer is large enough.
    """

    def __init__(self, empty: Callable[[Sequence[int], torch.dtype], Tensor]) -> None:
        self._empty = empty
        self._free: list[Tensor] = []
        self.bytes = 0

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """`length` elements, uninitialized: the smallest free buffer that holds them, or a new one."""
        fitting = [
            b for b in self._free if b.dtype == dtype and b.untyped_storage().nbytes() >= length * b.itemsize
        ]
        if not fitting:
            made = self._empty((_round_up(length),), dtype)
            self.bytes += made.nbytes
            return made[:length]
        best = min(fitting, key=lambda buffer: buffer.untyped_storage().nbytes())
        self._free = [buffer for buffer in self._free if buffer is not best]
        return best.as_strided((length,), (1,))

    def give(self, buffer: Tensor) -> None:
        """Give back what `take` handed out, when nothing reads or writes it any more."""
        self._free.append(buffer)


def _round_up(length: int) -> int:
    """At most an eighth more, so that a buffer serves for others of about its length."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step
