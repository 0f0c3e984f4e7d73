"""Bytes of compressed activations and gradients (`memory/compress.py`)."""

from __future__ import annotations

from hpctrain.memory.compress import BLOCK, ActivationFormat


def compress_peak(length: int, itemsize: int, form: ActivationFormat) -> int:
    """Return the largest number of bytes that `compress` allocates temporarily."""
    if form != "int8":
        return 2 * length if form == "bf16" and itemsize > 2 else 0
    blocks = -(-length // BLOCK)
    # Values and quotients in fp32, the rounded quotients, and a scale for each block.
    return blocks * (BLOCK * (4 + 4 + 1) + 4)


def compressed_bytes(length: int, itemsize: int, form: ActivationFormat) -> int:
    """Return the size of the result of `compress` for `length` elements of `itemsize` bytes."""
    if form == "int8":
        return -(-length // BLOCK) * (BLOCK + 4)
    return length * (min(2, itemsize) if form == "bf16" else itemsize)
