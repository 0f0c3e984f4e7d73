"""Pool of flat buffers that are used in turns."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from operator import itemgetter

import torch
from torch import Tensor


class BufferPool:
    """Flat buffers that are taken, given back and taken again.

    Args:
        empty: Function that allocates a tensor of a shape and dtype. It is called if no free buffer is large
            enough.

    Attributes:
        bytes: Size of all buffers, free or not.
    """

    def __init__(self, empty: Callable[[Sequence[int], torch.dtype], Tensor]) -> None:
        self._empty = empty
        self._free: list[tuple[int, Tensor]] = []  # with their sizes in bytes, sorted
        self.bytes = 0

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized flat tensor: the smallest sufficient free buffer, or a new one."""
        for place, (size, buffer) in enumerate(self._free):
            if size >= length * dtype.itemsize and buffer.dtype == dtype:
                del self._free[place]
                return buffer.as_strided((length,), (1,))
        buffer = self._empty((_round_up(length),), dtype)
        self.bytes += buffer.nbytes
        return buffer[:length]

    def give(self, buffer: Tensor) -> None:
        """Return a tensor of `take` to the pool. Nothing may read or write it afterwards."""
        insort(self._free, (buffer.untyped_storage().nbytes(), buffer), key=itemgetter(0))


def _round_up(length: int) -> int:
    """Return up to an eighth more than `length`, so that the buffer can be reused for similar lengths."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step
