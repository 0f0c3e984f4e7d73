"""Checksums of a tensor's pieces that any set of ranks can compute together, each from what it holds.

The flattened global tensor is cut into pieces of PIECE elements. A piece's checksum is the sum of
key(position in the piece) * bits(element), modulo 2^64, plus a seed of the dataset's name, type, shape
and the piece's number. Keys are odd, so every change of one element changes the sum; the seed tells
zeros that were written from a hole, and one dataset from another. Being a sum it does not depend on who
holds which elements: the ranks add up theirs and the group adds up the ranks'. It guards against
faults, not against forgery.
"""

from __future__ import annotations

from hashlib import blake2b
from math import prod
from threading import local

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.tensor_ranges import FlatRuns, Index, flat_runs
from hpctrain.splitmix import GOLDEN, mix

PIECE = 1 << 20
# Elements multiplied at a time: the products stay in the cache.
_BATCH = 1 << 18
_MODULUS = 1 << 64
# Keys made at a time: the temporaries stay small.
_KEYS = 1 << 15

Words = NDArray[np.unsignedinteger]
Sums = NDArray[np.uint64]


class _ThreadBuffers(local):
    def __init__(self) -> None:  # once in each thread
        self.products: Sums = np.empty(_BATCH, np.uint64)


class _Keys:
    """Keys of the positions of a piece, computed up to the largest position that was requested so far."""

    def __init__(self) -> None:
        # Pages that nothing has written to take no memory.
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
    """Number of pieces of a tensor."""
    return -(-elements // PIECE)


def seeds(dataset: str, kind: str, shape: Index) -> Sums:
    """What every piece's sum starts from, a uint64 array [pieces]."""
    text = f"{dataset} {kind} {list(shape)}".encode()
    base = np.array(int.from_bytes(blake2b(text, digest_size=8).digest(), "little"), np.uint64)
    sums: Sums = (np.arange(pieces(prod(shape)), dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * base
    return sums


def working_bytes(elements: int) -> int:
    """Return the bytes that `add` keeps allocated after tensors of at most this many elements."""
    return 8 * (min(elements, PIECE) + min(elements, _BATCH))


def add(sums: Sums, words: Words, start: Index, shape: Index, whole: Index) -> None:
    """Add to the sums of a tensor of shape `whole` the box `shape` at `start`, given as its bits."""
    rest = words.reshape(-1)
    for group in flat_runs(start, shape, whole):
        count = group.count * group.length
        _add_runs(sums, rest[:count].reshape(group.count, group.length), group)
        rest = rest[count:]


def _add_runs(sums: Sums, rows: Words, group: FlatRuns) -> None:
    if group.stride == group.length:
        _add_run(sums, rows.reshape(-1), group.first)
        return
    row = 0
    while row < group.count:
        first = group.first + row * group.stride
        piece, position = divmod(first, PIECE)
        # Rows that end inside this piece are taken together; one that crosses its end or is long, alone.
        fitting = (PIECE - group.length - position) // group.stride + 1
        if fitting <= 0 or group.length > _BATCH:
            _add_run(sums, rows[row], first)
            row += 1
            continue
        count = min(fitting, group.count - row, _BATCH // group.length)
        keys = np.lib.stride_tricks.as_strided(
            _keys.first(position + (count - 1) * group.stride + group.length)[position:],
            (count, group.length),
            (8 * group.stride, 8),
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
        # Times an odd key a top bit moves nothing but the top bit: fold it down, or two would cancel.
        words = words ^ (words >> np.uint64(32))
    # Three passes over memory that stays in the cache take less than one that converts as it multiplies.
    products = _memory.products[: words.size].reshape(words.shape)
    np.copyto(products, words)
    np.multiply(products, keys, out=products)
    sums[piece] = (int(sums[piece]) + int(np.add.reduce(products, axis=None))) % _MODULUS
