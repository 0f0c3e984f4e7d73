"""Checksums of the pieces of a global tensor, which ranks compute from their local elements.

A flattened global tensor is cut into pieces of PIECE elements. The checksum of a piece is the sum of
key(position in the piece) * bits(element), modulo 2^64, plus a seed. Each rank sums its elements, and an
all-reduce adds the sums of the ranks, so the result does not depend on the layout.

Keys are odd, so that each change of one element changes the sum. The seed is computed from name, type and
shape of the dataset and from the number of the piece. It distinguishes datasets from each other, and written
zeros from a hole in the file. Checksums detect faults, not forgery.
"""

from __future__ import annotations

from hashlib import blake2b
from math import prod
from threading import local

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.tensor_ranges import FlatRuns, Index, split_into_runs
from hpctrain.splitmix import GOLDEN, mix

PIECE = 1 << 20
"""Number of elements of a piece with one checksum."""

_BATCH = 1 << 18
"""Number of elements that are multiplied at a time, so that the products stay in the cache."""

_MODULUS = 1 << 64
_KEYS = 1 << 15
"""Number of keys that are computed at a time, so that temporary arrays stay small."""

Words = NDArray[np.unsignedinteger]
"""Bits of elements as unsigned integers of the same size."""

Sums = NDArray[np.uint64]
"""Checksums [pieces] of one tensor or of several ones after each other."""


class _ThreadBuffers(local):
    """Buffer of products, one for each thread."""

    def __init__(self) -> None:  # once in each thread
        self.products: Sums = np.empty(_BATCH, np.uint64)


class _Keys:
    """Keys of the positions of a piece, computed up to the largest position that was requested so far."""

    def __init__(self) -> None:
        # The system allocates a page of memory when it is first written to.
        self._values: Sums = np.empty(PIECE, np.uint64)
        self._computed = 0

    def first(self, count: int) -> Sums:
        """Return an array that begins with at least `count` keys: splitmix64 of the position, made odd.

        The array has PIECE elements. Those after the first `count` may not be computed yet.
        """
        while self._computed < count:
            begin, end = self._computed, min(self._computed + _KEYS, PIECE)
            positions = np.arange(begin + 1, end + 1, dtype=np.uint64)
            self._values[begin:end] = mix(positions * np.uint64(GOLDEN)) | np.uint64(1)
            self._computed = end
        return self._values


_memory = _ThreadBuffers()
_keys = _Keys()


def pieces(elements: int) -> int:
    """Return the number of pieces of a tensor with this many elements."""
    return -(-elements // PIECE)


def seeds(dataset: str, kind: str, shape: Index) -> Sums:
    """Return the seed of each piece of a dataset, uint64 [pieces]."""
    text = f"{dataset} {kind} {list(shape)}".encode()
    base = np.array(int.from_bytes(blake2b(text, digest_size=8).digest(), "little"), np.uint64)
    sums: Sums = (np.arange(pieces(prod(shape)), dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * base
    return sums


def working_bytes(elements: int) -> int:
    """Return the bytes that `add` keeps allocated after tensors of at most this many elements."""
    return 8 * (min(elements, PIECE) + min(elements, _BATCH))


def add(sums: Sums, words: Words, start: Index, shape: Index, global_shape: Index) -> None:
    """Add the elements of a box to the checksums of a tensor.

    Args:
        sums: Checksums of the tensor, which are updated.
        words: Elements of the box in row-major order.
        start: Index of the first element of the box.
        shape: Shape of the box.
        global_shape: Shape of the tensor.
    """
    for runs, rows in split_into_runs(words.reshape(-1), start, shape, global_shape):
        _add_runs(sums, rows, runs)


def _add_runs(sums: Sums, rows: Words, runs: FlatRuns) -> None:
    if runs.stride == runs.length:
        _add_run(sums, rows.reshape(-1), runs.first)
        return
    row = 0
    while row < runs.count:
        first = runs.first + row * runs.stride
        piece, position = divmod(first, PIECE)
        # Rows that end inside this piece are added at once. A row that crosses its end, or a long row, is
        # added alone.
        fitting = (PIECE - runs.length - position) // runs.stride + 1
        if fitting <= 0 or runs.length > _BATCH:
            _add_run(sums, rows[row], first)
            row += 1
            continue
        count = min(fitting, runs.count - row, _BATCH // runs.length)
        keys = np.lib.stride_tricks.as_strided(
            _keys.first(position + (count - 1) * runs.stride + runs.length)[position:],
            (count, runs.length),
            (8 * runs.stride, 8),
            writeable=False,
        )
        _accumulate(sums, piece, rows[row : row + count], keys)
        row += count


def _add_run(sums: Sums, words: Words, first: int) -> None:
    done = 0
    while done < words.size:
        piece, position = divmod(first + done, PIECE)
        count = min(_BATCH, PIECE - position, words.size - done)
        keys = _keys.first(position + count)[position : position + count]
        _accumulate(sums, piece, words[done : done + count], keys)
        done += count


def _accumulate(sums: Sums, piece: int, words: Words, keys: Sums) -> None:
    if words.dtype.itemsize == 8:
        # The highest bit times an odd key changes only the highest bit of the sum, so two such changes would
        # cancel. Therefore the upper half is folded into the lower one.
        words = words ^ (words >> np.uint64(32))
    # Three passes over memory in the cache are faster than one pass that converts and multiplies.
    products = _memory.products[: words.size].reshape(words.shape)
    np.copyto(products, words)
    np.multiply(products, keys, out=products)
    sums[piece] = (int(sums[piece]) + int(np.add.reduce(products, axis=None))) % _MODULUS
