"""Heads of tensor ranks."""

from __future__ import annotations

import pytest

from hpctrain.deck.head_split import HeadSplit

SPLITS = [(heads, shared) for shared in range(1, 9) for heads in range(shared, 19, shared)]


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        ((9, 3), 2, HeadSplit([6, 3], [2, 1])),
        ((8, 8), 2, HeadSplit([4, 4], [4, 4])),
        ((7, 7), 3, HeadSplit([3, 2, 2], [3, 2, 2])),
        ((5, 1), 2, HeadSplit([3, 2], [1, 1], (2,))),
        ((14, 2), 4, HeadSplit([4, 3, 4, 3], [1, 1, 1, 1], (2, 2))),
        ((6, 3), 4, HeadSplit([1, 1, 2, 2], [1, 1, 1, 1], (2, 1, 1))),
    ],
)
def test_heads_of_ranks(heads: tuple[int, int], ranks: int, expected: HeadSplit) -> None:
    assert HeadSplit.of(*heads, ranks) == expected


@pytest.mark.parametrize(("heads", "shared"), SPLITS)
def test_each_query_is_on_one_rank_with_its_key(heads: int, shared: int) -> None:
    for ranks in range(1, heads + 1):
        split = HeadSplit.of(heads, shared, ranks)
        on_ranks = list(zip(split.first_query_heads, split.query_heads, strict=True))
        assert [head for first, count in on_ranks for head in range(first, first + count)] == [*range(heads)]
        held = list(zip(split.first_key_value_heads, split.key_value_heads, strict=True))
        for (first, count), (first_key, keys) in zip(on_ranks, held, strict=True):
            needed = {head * shared // heads for head in range(first, first + count)}
            assert needed == set(range(first_key, first_key + keys))
        assert split.holder_counts == () or sum(split.holder_counts) == ranks
        queries, key_values = split.padded_heads
        assert queries % key_values == 0
        evenly = shared % ranks == 0 or (ranks % shared == 0 and heads % ranks == 0)
        assert split.is_even == evenly, (heads, shared, ranks)
