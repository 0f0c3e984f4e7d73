"""A hint to the system about what will be waited for, so that the disk works while the processor does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_START = 2  # SYNC_FILE_RANGE_WRITE


def start_writing(descriptor: int, offset: int, count: int) -> None:
    """Begin to bring `count` bytes at `offset` to the disk, where the system can; fsync must follow."""
    start = _sync_file_range()
    if start is not None:
        start(descriptor, offset, count, _START)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], object] | None:
    """Linux's call, which Python does not have."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function
