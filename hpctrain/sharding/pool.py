"""Memory that flat buffers take turns in."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from operator import itemgetter

import torch
from torch import Tensor


class Pool:
    """Flat buffers that are handed out, given back and handed out again.

    `empty` makes new memory of a shape and type where no free buffer is large enough.
    """

    def __init__(self, empty: Callable[[Sequence[int], torch.dtype], Tensor]) -> None:
        self._empty = empty
        self._free: list[tuple[int, Tensor]] = []  # with the bytes behind it, the smallest first
        self.bytes = 0

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """`length` elements, uninitialized: the smallest free buffer that holds them, or a new one."""
        for place, (room, buffer) in enumerate(self._free):
            if room >= length * dtype.itemsize and buffer.dtype == dtype:
                del self._free[place]
                return buffer.as_strided((length,), (1,))
        made = self._empty((_round_up(length),), dtype)
        self.bytes += made.nbytes
        return made[:length]

    def give(self, buffer: Tensor) -> None:
        """Give back what `take` handed out, when nothing reads or writes it any more."""
        insort(self._free, (buffer.untyped_storage().nbytes(), buffer), key=itemgetter(0))


def _round_up(length: int) -> int:
    """At most an eighth more, so that a buffer serves for others of about its length."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step
