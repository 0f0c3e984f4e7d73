"""Library that is compiled from `functions.c`, as ctypes calls it; as a program, a trial of it.

The program calls all functions once. It imports only the standard library, so that it starts quickly. It runs
in another process, because a compiled function may have instructions that the processor, or an emulator, does
not know, which ends the process.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from itertools import product
from typing import Any

_LANES, _ROWS, _PANEL, _BLOCK = 16, 64, 32, 1024
"""Constants of the same names in `functions.c`."""
PAGE, MAX_QUERIES = _PANEL, 8
"""Tokens of a page, and the largest number of queries that are computed at a time."""


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


class Address(ctypes.c_void_p):
    """Argument type of an address: of a tensor, of an array of ctypes, or None."""

    @classmethod
    def from_param(cls, value: Any) -> Any:
        """Return what ctypes passes to a function for a value."""
        return ctypes.c_void_p(value.data_ptr()) if hasattr(value, "data_ptr") else value


class Size(ctypes.c_int):
    """Argument type of the number of bytes of an element, 4 or 2."""


class Offset(ctypes.c_int):
    """Argument type of a number that is added to weights, 0 or 1."""


class LogitColumns(ctypes.c_int64):
    """Argument type of the number of columns of logits, which are read in blocks of 1,024."""


class ChosenColumns(Address):
    """Argument type of the address of a column for each row of logits, int64, negative for none."""


_POINTERS = {kind: ctypes.POINTER(kind) for kind in (Heads, AttentionArguments, Paged)}
_P, _N, _F, _H = Address, ctypes.c_int64, ctypes.c_float, _POINTERS[Heads]

FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("gelu", "gated", "geglu"), (_P, _P, _N, _N, Size)),
    **dict.fromkeys(("gelu_gradient", "gated_gradient", "geglu_gradient"), (_P, _P, _P, _N, _N, Size)),
    "rms_norm": (_P, _N, _P, _P, _P, _N, _N, _N, _F, Offset, Size),
    "rms_norm_gradient": (_P, _P, _N, _P, _P, _P, _P, _N, _N, _N, Offset, Size),
    "layer_norm": (_P, _P, _P, _P, _P, _P, _N, _N, _F, Size),
    "layer_norm_gradient": (_P, _P, _P, _P, _P, _P, _P, _P, _N, _N, Size),
    "softmax_statistics": (_P, ChosenColumns, _P, _P, _P, _N, LogitColumns, LogitColumns, _F, Size),
    "softmax_gradient": (_P, ChosenColumns, _P, _P, _P, _N, LogitColumns, LogitColumns, _F, Size),
    "attend": (_POINTERS[AttentionArguments], _H, _H, _H, _H, _P, _P),
    "attend_gradient": (_POINTERS[AttentionArguments], _H, _H, _H, _H, _H, _H, _H, _H, _P, _P),
    "attend_paged": (_POINTERS[Paged], _H, _H, _H, _H, _P),
    "few_rows": (_P, _P, _P, _P, _P, _N, _N, _N, _N),
}
"""Types of the arguments of each function, as in `functions.c`."""


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
    return 6 * keys * width + _ROWS * (2 * (keys + _LANES) + 3 * width)


def few_rows_floats(rows: int, features: int) -> int:
    """Return the number of temporary floats of a product of a few rows."""
    return -(-rows // (2 * _LANES)) * 2 * _LANES * features


def declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the arguments of all functions of the library, and return it.

    Raises:
        AttributeError: The library lacks a function.
    """
    for name, arguments in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def call_all(library: ctypes.CDLL) -> None:
    """Call every function in both formats, with and without options, with complete vectors and remainders."""
    rows, heads, head, count = _ROWS + 6, 2, 2 * _LANES + 8, 2 * _LANES + 2
    bytes_of_each = 4 * workspace_floats(rows, head)  # more than any other argument needs
    written, zeros = (ctypes.create_string_buffer(bytes_of_each) for _ in range(2))
    at, zero = ctypes.addressof(written), ctypes.addressof(zeros)
    attention = [
        AttentionArguments(rows, 1, heads, 1, head, size, 1.0, at, at, *bounds)
        for size in (4, 2)
        for bounds in ((), (3, 1.0, zero))
    ]
    values: dict[Any, list[Any]] = {
        ctypes.c_int64: [count],
        LogitColumns: [_BLOCK + 8],
        ChosenColumns: [(ctypes.c_int64 * count)(-1, _BLOCK)],
        ctypes.c_float: [1.0],
        Size: [4, 2],
        Offset: [0, 1],
        _POINTERS[Heads]: [Heads(at, heads * head, heads * head, head)],
        _POINTERS[AttentionArguments]: attention,
        # All rows belong to text 0 at its first position, in page 0.
        _POINTERS[Paged]: [
            Paged(each, 1, key, at, at, *[zero] * 4) for each in attention for key in (4, each.element)
        ],
    }
    for name, kinds in FUNCTIONS.items():
        for options in product(*(values.get(kind, [None]) for kind in kinds)):
            new = (ctypes.create_string_buffer(bytes_of_each) for _ in kinds)
            getattr(library, name)(*(next(new) if each is None else each for each in options))


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    call_all(declare_functions(ctypes.CDLL(sys.argv[1])))
