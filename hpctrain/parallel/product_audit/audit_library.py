"""The library that is made of `audit.c`; as a program, it calls all functions of one.

Imports nothing but what Python brings, as `function_library.py` does, and for the same reasons.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

ROWS, COLUMNS = 9, 70
"""Of a matrix that has all cases: more rows than are taken at a time, and columns that are left over."""


def call_all(library: ctypes.CDLL) -> None:
    """Every function, of both formats, on zeros."""
    memory = ctypes.create_string_buffer(4 * ROWS * COLUMNS)
    x, sizes = ctypes.byref(memory), [ctypes.c_int64(each) for each in (ROWS, COLUMNS, COLUMNS)]
    for size in (4, 2):
        for weights in (x, None):
            library.audit_rows(x, *sizes, x, weights, x, x, size)
            library.audit_columns(x, *sizes, x, weights, x, x, size)
        library.audit_matrix(x, *sizes, x, x, x, x, x, x, size)
    factors, beside = (map(ctypes.c_float, (1.0, 1.0, 1.0)) for _ in range(2))
    library.audit_judge(sizes[0], x, x, x, x, sizes[1], *factors, 1, *beside, x)


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    call_all(ctypes.CDLL(str(Path(sys.argv[1]).resolve())))
