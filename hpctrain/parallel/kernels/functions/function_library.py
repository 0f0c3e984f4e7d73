"""Library that is compiled from `functions.c`, as ctypes calls it; as a program, a trial of it.

The program calls all functions once. It imports only the standard library, so that it starts quickly. It runs
in another process, because a compiled function may have instructions that the processor, or an emulator, does
not know, which ends the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_LANES, _ROWS, _PANEL, _BLOCK = 16, 64, 32, 1024  # as in functions.c
PAGE, HIGHEST = _PANEL, 8  # tokens of a page there, and the most queries at a time


class Heads(ctypes.Structure):
    """Tensor [s, b, heads, d] in `functions.c`: its address, and its strides in elements."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
    )


class AttentionArguments(ctypes.Structure):
    """Sizes, scale, rotation tables, window, cap and sinks of attention in `functions.c`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "batch", "heads", "groups", "head")),
        ("element", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("cap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


class Paged(ctypes.Structure):
    """Pages of keys and values, and the positions of rows, in `functions.c`."""

    _fields_ = (
        ("attention", AttentionArguments),
        ("text_pages", ctypes.c_int64),
        ("key_element", ctypes.c_int),
        *(
            (name, ctypes.c_void_p)
            for name in ("keys", "values", "texts", "positions", "rotations", "tables")
        ),
    )


def padded(head: int) -> int:
    """Return the features of a head, padded to complete vector lanes."""
    return -(-head // _LANES) * _LANES


def workspace_floats(rows: int, head: int) -> int:
    """Return the number of temporary floats of attention of one sequence and head.

    Args:
        rows: Tokens of the sequence.
        head: Features of the head.
    """
    keys, width = -(-rows // _PANEL) * _PANEL, padded(head)
    return 6 * keys * width + _ROWS * (2 * keys + 3 * width)


def few_rows_floats(rows: int, features: int) -> int:
    """Return the number of temporary floats of a product of a few rows."""
    return -(-rows // (2 * _LANES)) * 2 * _LANES * features


def open_library(content: bytes) -> ctypes.CDLL:
    """Load a library from memory, since folders of temporary files may forbid programs.

    Its file remains open: the loader identifies libraries by name, and would return it for another one.

    Raises:
        OSError: The library cannot be loaded.
    """
    file = os.memfd_create("hpctrain-functions")
    with os.fdopen(os.dup(file), "wb") as stream:
        stream.write(content)
    return ctypes.CDLL(f"/proc/self/fd/{file}")


def call_all(library: ctypes.CDLL) -> None:
    """Call every function of the library in both formats, with complete tiles and remainders."""
    rows, heads, head = _ROWS + 6, 2, 2 * _LANES + 8
    memory = ctypes.create_string_buffer(4 * workspace_floats(rows, head))
    zeros = ctypes.create_string_buffer(4 * rows * heads * head)
    x, height, width = ctypes.byref(zeros), ctypes.c_int64(rows), ctypes.c_int64(head)
    address = ctypes.addressof(zeros)
    tensor = ctypes.byref(Heads(address, heads * head, heads * head, head))
    first, last = ctypes.c_int64(0), ctypes.c_int64(1)
    column = (ctypes.c_int64 * 2)(-1, _BLOCK)
    texts = (ctypes.c_int64 * rows)()
    scratch = ctypes.create_string_buffer(4 * HIGHEST * (_PANEL + 2 * padded(head)))
    for size in (4, 2):
        sizes = ctypes.byref(AttentionArguments(rows, 1, heads, 1, head, size, 1.0, address, address))
        for name in ("gelu", "gated", "geglu"):
            library[name](x, x, height, width, size)
            library[f"{name}_gradient"](x, x, x, height, width, size)
        token, count = ctypes.c_int64(heads * head), ctypes.c_int64(heads)
        for offset in (0, 1):
            head_sizes = height, count, width
            library.rms_norm(x, token, x, x, memory, *head_sizes, ctypes.c_float(1.0), offset, size)
            library.rms_norm_gradient(x, x, token, x, memory, x, memory, *head_sizes, offset, size)
        library.layer_norm(x, x, x, x, memory, memory, height, width, ctypes.c_float(1.0), size)
        library.layer_norm_gradient(x, x, x, memory, memory, x, memory, memory, height, width, size)
        row_sizes = ctypes.c_int64(2), *[ctypes.c_int64(_BLOCK + 8)] * 2, ctypes.c_float(1.0), size
        library.softmax_statistics(memory, column, x, x, x, *row_sizes)
        library.softmax_gradient(memory, column, x, x, x, *row_sizes)
        bounds = 3, 1.0, address
        bounded = ctypes.byref(
            AttentionArguments(rows, 1, heads, 1, head, size, 1.0, address, address, *bounds)
        )
        library.attend(sizes, *[tensor] * 4, x, memory, first, last)
        library.attend(bounded, *[tensor] * 4, x, memory, first, last)
        whole = [ctypes.c_int64(each) for each in (2 * _LANES + 3, _LANES + 5, _LANES + 8, _LANES + 1)]
        library.few_rows(x, x, x, x, memory, *whole)
        library.attend_gradient(sizes, *[tensor] * 8, x, memory, first, last)
        library.attend_gradient(bounded, *[tensor] * 8, x, memory, first, last)
        # All rows belong to text 0 at its first position, in page 0.
        none = ctypes.addressof(texts)
        attention = AttentionArguments(HIGHEST + 1, 1, heads, 1, head, size, 1.0, address, address)
        for key_size in (4, size):
            pages = Paged(
                attention, 1, key_size, ctypes.addressof(memory), ctypes.addressof(memory), *[none] * 4
            )
            library.attend_paged(ctypes.byref(pages), *[tensor] * 4, scratch)


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    call_all(open_library(Path(sys.argv[1]).read_bytes()))
