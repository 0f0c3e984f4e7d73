"""Checksums against their definition, and against every way to divide the work."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.tensor_ranges import flat_range_boxes

MASK = 2**64 - 1


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    """The sums of no elements."""
    return np.zeros(checksum.pieces(prod(shape)), np.uint64)


def defined(words: np.ndarray) -> list[int]:
    """The documented sums, in plain integers."""
    sums = [0] * checksum.pieces(words.size)
    for index, word in enumerate(words.reshape(-1).tolist()):
        piece, position = divmod(index, checksum.PIECE)
        mixed = ((position + 1) * 0x9E3779B97F4A7C15) & MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        key = (mixed ^ (mixed >> 31)) | 1
        folded = word ^ (word >> 32) if words.itemsize == 8 else word
        sums[piece] = (sums[piece] + key * folded) & MASK
    return sums


def whole(words: np.ndarray) -> np.ndarray:
    sums = zeros(words.shape)
    checksum.add(sums, words, (0,) * words.ndim, words.shape, words.shape)
    return sums


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8"])
def test_equals_its_definition(kind: str) -> None:
    words = np.random.default_rng(1).integers(0, 256, (61, 50, np.dtype(kind).itemsize), np.uint8)
    words = words.view(kind)[..., 0]
    assert whole(words).tolist() == defined(words)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_division_gives_the_same_sums(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(1100, 1000), (3, 700, 600), (1 << 20, 2), (2_500_000,)]))
    words = np.random.default_rng(2).integers(0, 2**32, shape, np.uint32)
    cuts = [sorted({0, n, data.draw(st.integers(0, n)), data.draw(st.integers(0, n))}) for n in shape]
    sums = zeros(shape)
    for corner in np.ndindex(*(len(c) - 1 for c in cuts)):
        start = tuple(c[i] for c, i in zip(cuts, corner, strict=True))
        stop = tuple(c[i + 1] for c, i in zip(cuts, corner, strict=True))
        part = np.ascontiguousarray(words[tuple(map(slice, start, stop))])
        checksum.add(sums, part, start, part.shape, shape)
    assert sums.tolist() == whole(words).tolist()


def test_flat_ranges_give_the_same_sums() -> None:
    words = np.random.default_rng(3).integers(0, 2**16, (1300, 900), np.uint16)
    sums = zeros(words.shape)
    bounds = [0, 1, 900, 12345, 1_048_575, 1_048_577, words.size]
    for first, last in pairwise(bounds):
        for start, shape in flat_range_boxes(words.shape, first, last):
            part = np.ascontiguousarray(
                words[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
            )
            checksum.add(sums, part, start, shape, words.shape)
    assert sums.tolist() == whole(words).tolist()


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8"])
def test_notices_flips_swaps_and_pairs_of_signs(kind: str) -> None:
    size = np.dtype(kind).itemsize
    words = np.random.default_rng(4).integers(0, 256, 64 * size, np.uint8).view(kind)
    good = whole(words).tolist()
    for byte in range(words.nbytes):
        for bit in range(8):
            bad = words.copy()
            bad.view(np.uint8)[byte] ^= 1 << bit
            assert whole(bad).tolist() != good
    for other in range(1, 64):
        swapped, signs = words.copy(), words.copy()
        swapped[[0, other]] = words[[other, 0]]
        signs[[0, other]] ^= np.array(1 << (8 * size - 1), kind)
        assert whole(signs).tolist() != good
        assert words[0] == words[other] or whole(swapped).tolist() != good


def test_seeds_tell_datasets_types_shapes_and_pieces_apart() -> None:
    shape = (3 * checksum.PIECE,)
    seeds = [
        *checksum.seeds("/model/a", "float32", shape).tolist(),
        *checksum.seeds("/model/b", "float32", shape).tolist(),
        *checksum.seeds("/model/a", "int32", shape).tolist(),
        *checksum.seeds("/model/a", "float32", (3, checksum.PIECE)).tolist(),
    ]
    assert len(set(seeds)) == len(seeds) == 12
    assert 0 not in seeds


def test_long_rows_with_gaps() -> None:
    """Columns so wide that a row of them is more than what is multiplied at a time."""
    words = np.random.default_rng(4).integers(0, 2**32, (3, 700_001), np.uint32)
    sums = zeros(words.shape)
    for first, last in pairwise((0, 333_333, 700_001)):
        checksum.add(sums, words[:, first:last].copy(), (0, first), (3, last - first), words.shape)
    assert sums.tolist() == whole(words).tolist()


def test_small_tensors_take_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_keys", checksum._Keys())
    words = np.arange(5000, dtype=np.uint32)
    tracemalloc.start()
    whole(words)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * checksum.PIECE / 2
    longer = np.arange(checksum.PIECE + 70_000, dtype=np.uint8)
    assert whole(longer).tolist() == defined(longer)
