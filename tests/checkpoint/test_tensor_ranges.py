"""Flat ranges of padded pieces against numpy indexing."""

from __future__ import annotations

from itertools import chain, pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.tensor_ranges import TensorRange, boxes_of, flat_range_boxes, flat_runs
from hpctrain.parallel.shards import Shard


@st.composite
def held(draw: Any) -> tuple[TensorRange, np.ndarray]:
    """An TensorRange of a random piece whose values are global flat indices, -1 in the padding."""
    dims = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(0, 6)) for _ in range(dims))
    start = tuple(draw(st.integers(0, n)) for n in shape)
    local = tuple(draw(st.integers(0, 7)) for _ in range(dims))
    shard = Shard("t", shape, start, local)
    everywhere = np.full(local, -1)
    index = np.arange(prod(shape)).reshape(shape)
    everywhere[tuple(slice(0, n) for n in shard.extent)] = index[shard.slices]
    first = draw(st.integers(0, shard.elements))
    last = draw(st.integers(first, shard.elements))
    values = everywhere.reshape(-1)[first:last].copy()
    copies = draw(st.integers(1, 3))
    copy = draw(st.integers(0, copies - 1))
    return TensorRange("/model/t", shard, torch.from_numpy(values), first, copy, copies), values


@settings(max_examples=400, deadline=None)
@given(held(), st.integers(1, 50))
def test_blocks_hold_the_global_elements(given_: tuple[TensorRange, np.ndarray], limit: int) -> None:
    entry, values = given_
    index = np.arange(prod(entry.shape)).reshape(entry.shape)
    seen = []
    for block in boxes_of(entry):
        for piece in block.cut(limit):
            assert piece.elements <= limit
            view = piece.view(entry.values)
            where = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
            assert np.array_equal(view.numpy(), index[where])
            in_runs = [
                group.first + row * group.stride + k
                for group in flat_runs(piece.start, piece.shape, entry.shape)
                for row in range(group.count)
                for k in range(group.length)
            ]
            assert in_runs == index[where].reshape(-1).tolist()
            seen += view.reshape(-1).tolist()
    assert seen == [value for value in values.tolist() if value >= 0]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_a_range_makes_few_rectangles(shape: list[int], data: Any) -> None:
    total = prod(shape)
    first = data.draw(st.integers(0, total))
    last = data.draw(st.integers(first, total))
    found = list(flat_range_boxes(tuple(shape), first, last))
    assert len(found) <= 2 * len(shape) - 1
    index = np.arange(total).reshape(shape)
    parts = [
        index[tuple(slice(s, s + n) for s, n in zip(*one, strict=True))].reshape(-1).tolist() for one in found
    ]
    assert list(chain.from_iterable(parts)) == list(range(first, last))


@given(st.integers(0, 10), st.integers(1, 5), st.booleans())
def test_shares_of_copies_tile_the_values(count: int, copies: int, large: bool) -> None:
    values = torch.zeros(count + (1 << 18 if large else 0))
    shard = Shard.replicated("t", tuple(values.shape))
    shares = [TensorRange("/model/t", shard, values, 0, copy, copies).share() for copy in range(copies)]
    covered = sorted(share for share in shares if share[0] < share[1])
    assert sum(last - first for first, last in covered) == values.numel()
    assert all(one[1] == other[0] for one, other in pairwise(covered))
    assert len(covered) == (copies if large else min(1, count))
