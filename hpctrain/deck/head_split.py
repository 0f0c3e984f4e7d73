"""Heads of attention that each tensor rank computes, also if ranks do not divide them evenly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class HeadSplit(NamedTuple):
    """Heads of each tensor rank, and how many heads all ranks have memory for.

    Ranks have whole key/value heads, each with its queries. If there are more ranks than key/value heads,
    several ranks hold the same key/value head, and split its queries. All ranks compute as many heads as the
    one that has most: others fill up with heads of zeros, which change nothing.

    Example: 9 heads with 3 key/value heads on 2 ranks. Rank 0 has key/value heads 0 and 1 with queries 0 to
    5. Rank 1 has key/value head 2 with queries 6 to 8, and one key/value head and 3 queries of zeros.

    Attributes:
        queries: Number of heads of queries of each rank.
        key_values: Number of key/value heads of each rank.
        holders: Number of neighboring ranks that hold each key/value head, in the order of heads. It is empty
            if each is on one rank.
    """

    queries: Sequence[int]
    key_values: Sequence[int]
    holders: tuple[int, ...] = ()

    @staticmethod
    def of(heads: int, key_value_heads: int, ranks: int) -> HeadSplit:
        """Return the heads of `ranks` tensor ranks, of which there are at most `heads`."""
        queries_per_head = heads // key_value_heads
        if ranks <= key_value_heads:
            key_values = _even_sizes(key_value_heads, ranks)
            return HeadSplit([queries_per_head * each for each in key_values], key_values)
        holders = _even_sizes(ranks, key_value_heads)
        queries = [count for each in holders for count in _even_sizes(queries_per_head, each)]
        return HeadSplit(queries, [1] * ranks, tuple(holders))

    @property
    def is_even(self) -> bool:
        """True if all ranks have the same number of heads, and none has heads of zeros."""
        return len(set(self.queries)) == 1

    @property
    def padded(self) -> tuple[int, int]:
        """Numbers of heads of queries and of key/value heads that every rank computes."""
        return max(self.queries), max(self.key_values)

    @property
    def first_queries(self) -> list[int]:
        """First head of queries of each rank."""
        return [0, *accumulate(self.queries[:-1])]

    @property
    def first_key_values(self) -> list[int]:
        """First key/value head of each rank."""
        if self.holders:
            return [head for head, count in enumerate(self.holders) for _ in range(count)]
        return [0, *accumulate(self.key_values[:-1])]


def _even_sizes(count: int, parts: int) -> list[int]:
    """Return the sizes of parts of `count` things, of which the first ones may have one more."""
    size, more = divmod(count, parts)
    return [size + (number < more) for number in range(parts)]
