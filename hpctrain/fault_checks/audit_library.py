"""Program that tries the library that is compiled from `audit.c`: it calls all functions once.

It imports only the standard library, for the same reasons as `function_library.py` in
`parallel/kernels/functions/`.
"""

from __future__ import annotations

import ctypes
import sys

ROWS, COLUMNS = 9, 70
"""Sizes of a matrix with all cases: more rows than are computed at a time, and a remainder of columns."""


def call_all(library: ctypes.CDLL) -> None:
    """Call every function of the library on zeros, in both formats."""
    memory = ctypes.create_string_buffer(4 * ROWS * COLUMNS)
    x, sizes = ctypes.byref(memory), [ctypes.c_int64(each) for each in (ROWS, COLUMNS, COLUMNS)]
    for size in (4, 2):
        for weights in (x, None):
            library.audit_rows(x, *sizes, x, weights, x, x, size)
            library.audit_columns(x, *sizes, x, weights, x, x, size)
        library.audit_matrix(x, *sizes, x, x, x, x, x, x, size)
    factors, others = (map(ctypes.c_float, (1.0, 1.0, 1.0)) for _ in range(2))
    library.audit_judge(sizes[0], x, x, x, x, sizes[1], *factors, 1, *others, x)


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    call_all(ctypes.CDLL(sys.argv[1]))
