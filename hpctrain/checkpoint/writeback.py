"""Hint to Linux to start writing to the disk, so that a later fsync takes less time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_START = 2  # SYNC_FILE_RANGE_WRITE


def start_writing(descriptor: int, offset: int, count: int) -> None:
    """Start to write `count` bytes at `offset` to the disk if the system supports it. fsync must follow."""
    start = _sync_file_range()
    if start is not None:
        start(descriptor, offset, count, _START)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], object] | None:
    """Return the function `sync_file_range` of Linux, which Python lacks; None if there is none."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function
