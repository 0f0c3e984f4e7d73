"""Attention heads of each tensor rank, also if the number of ranks does not divide that of heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class HeadSplit(NamedTuple):
    """Attention heads of each tensor rank, and the number of heads that every rank computes.

    A rank has whole groups: a key/value head with its query heads. With more ranks than key/value heads,
    several ranks hold the same key/value head, and split its query heads. All ranks compute as many heads as
    the rank with most heads. The other ranks are padded with heads whose weights are zero. These add nothing
    to the output.

    Example: 9 query heads and 3 key/value heads on 2 ranks. Rank 0 has key/value heads 0 and 1 with query
    heads 0 to 5. Rank 1 has key/value head 2 with query heads 6 to 8. It is padded with one key/value head
    and 3 query heads, so that both ranks compute 6 query heads.

    Attributes:
        query_heads: Number of query heads of each rank, without padding.
        key_value_heads: Number of key/value heads of each rank, without padding.
        holder_counts: Number of neighboring ranks that hold each key/value head, in the order of heads. It is
            empty if each is on one rank.
    """

    query_heads: Sequence[int]
    key_value_heads: Sequence[int]
    holder_counts: tuple[int, ...] = ()

    @staticmethod
    def of(heads: int, key_value_heads: int, ranks: int) -> HeadSplit:
        """Return how tensor ranks split the heads of a model.

        Args:
            heads: Number of query heads, a multiple of `key_value_heads`.
            key_value_heads: Number of key/value heads.
            ranks: Number of tensor ranks, at most `heads`.
        """
        group_size = heads // key_value_heads
        if ranks <= key_value_heads:
            local_key_value_heads = _even_sizes(key_value_heads, ranks)
            return HeadSplit([group_size * count for count in local_key_value_heads], local_key_value_heads)
        holder_counts = _even_sizes(ranks, key_value_heads)
        query_heads = [count for holders in holder_counts for count in _even_sizes(group_size, holders)]
        return HeadSplit(query_heads, [1] * ranks, tuple(holder_counts))

    @property
    def is_even(self) -> bool:
        """True if all ranks have the same number of heads, so that no rank is padded."""
        return len(set(self.query_heads)) == 1

    @property
    def padded_heads(self) -> tuple[int, int]:
        """Numbers of query heads and of key/value heads that every rank computes, including padding."""
        return max(self.query_heads), max(self.key_value_heads)

    @property
    def first_query_heads(self) -> list[int]:
        """Number of the first query head of each rank."""
        return [0, *accumulate(self.query_heads[:-1])]

    @property
    def first_key_value_heads(self) -> list[int]:
        """Number of the first key/value head of each rank."""
        if self.holder_counts:
            return [head for head, count in enumerate(self.holder_counts) for _ in range(count)]
        return [0, *accumulate(self.key_value_heads[:-1])]


def _even_sizes(count: int, parts: int) -> list[int]:
    """Return the sizes of parts of `count`, which differ by at most one. Larger ones come first."""
    size, remainder = divmod(count, parts)
    return [size + (number < remainder) for number in range(parts)]
