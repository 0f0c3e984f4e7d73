"""Ring attention over the context axis (arXiv 2310.01889), with balanced causal work.

The sequence is cut into 2c pieces. Rank r holds piece r (early) and piece 2c - 1 - r (late). In each of c
rounds a rank computes with the keys and values of one rank, while the next ones arrive from its neighbor.
With 2 ranks and pieces 0 1 2 3:

    rank 0 (pieces 0 3): round 1 its own keys; round 2 queries 3 over keys 1 2
    rank 1 (pieces 1 2): round 1 its own keys; round 2 queries 1 2 over keys 0

Every rank has the same work in every round: all its queries over the early half of an earlier rank's keys, or
its late queries over all keys of a later rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.data.documents import Documents
from hpctrain.parallel.kernels.attention_block import attend, attend_backward, merge
from hpctrain.parallel.kernels.layer_functions import rotate

_KEYS, _GRADIENTS = 1, 2
"""Message tags: keys and values, and their gradients."""


class _Ring:
    """Ring of ranks: each sends a tensor to the next rank and receives that of the previous one."""

    def __init__(self, group: Group, tag: int) -> None:
        self.group, self.tag = group, tag
        self.works: list[Work[Any]] = []

    def start(self, outgoing: Tensor, incoming: Tensor) -> None:
        group = self.group
        self.works = [
            group.start_recv(incoming, (group.rank - 1) % group.size, self.tag),
            group.start_send(outgoing, (group.rank + 1) % group.size, self.tag),
        ]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


def _visible(source: int, rank: int, half: int) -> tuple[slice, slice, bool]:
    """Return which queries see which keys of rank `source`, and whether a causal mask applies."""
    if source == rank:
        return slice(None), slice(None), True
    if source < rank:
        return slice(None), slice(0, half), False
    return slice(half, None), slice(None), False


def _rows_before(position: int, rank: int, ranks: int, half: int) -> int:
    """Return how many rows of a rank are before a position of the sequence."""
    early, late = rank * half, (2 * ranks - 1 - rank) * half
    return min(max(position - early, 0), half) + min(max(position - late, 0), half)


Block = tuple[slice, slice, slice, bool]
"""Rows of the batch, of the queries and of the keys, and whether a causal mask applies between these."""


def _blocks(source: int, group: Group, half: int, documents: Documents | None) -> Iterator[Block]:
    """Yield the blocks in which this rank's queries see keys of rank `source`: one, or one for each document.

    The rows that a rank has of a document are consecutive, even if they are of both its pieces.
    """
    rank, ranks = group.rank, group.size
    queries, keys, causal = _visible(source, rank, half)
    if documents is None:
        yield slice(None), queries, keys, causal
        return
    for row, begin, end in documents.pieces:
        found = []
        for holder, visible in ((rank, queries), (source, keys)):
            first, last, _ = visible.indices(2 * half)
            own = (_rows_before(place, holder, ranks, half) for place in (begin, end))
            found.append(slice(*(min(max(place, first), last) for place in own)))
        if all(each.start < each.stop for each in found):
            yield slice(row, row + 1), found[0], found[1], causal


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: Group,
        scale: float | None,
        documents: Documents | None,
    ) -> Tensor:
        ctx.group, ctx.scale, ctx.documents, half = group, scale, documents, query.shape[0] // 2
        held = torch.stack((key, value))
        arriving = torch.empty_like(held)
        ring = _Ring(group, _KEYS)
        rows, batch, heads, _ = query.shape
        output = query.new_empty(query.shape, dtype=torch.float32)
        log_sum = query.new_empty(batch, heads, rows, dtype=torch.promote_types(query.dtype, torch.float32))
        for turn in range(group.size):
            if turn < group.size - 1:
                ring.start(held, arriving)
            source = (group.rank - turn) % group.size
            for some, queries, keys, causal in _blocks(source, group, half, documents):
                part = attend(query[queries, some], held[0][keys, some], held[1][keys, some], causal, scale)
                into = output[queries, some], log_sum[some, :, queries]
                if turn == 0:  # with its own keys, of which every query sees some
                    for mine, each in zip(into, part, strict=True):
                        mine.copy_(each)
                else:
                    merge(*into, *part)
            if turn < group.size - 1:
                ring.wait()
                held, arriving = arriving, held
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, log_sum)
        return result

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        group: Group = ctx.group
        query, key, value, output, log_sum = ctx.saved_tensors
        half = query.shape[0] // 2
        held = torch.stack((key, value))
        arriving = torch.empty_like(held)
        keys_ring, gradients_ring = _Ring(group, _KEYS), _Ring(group, _GRADIENTS)
        of_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        own = torch.zeros(held.shape, dtype=torch.float32, device=query.device)
        # The sum for a rank's keys starts at its successor and returns to the rank in the last round.
        carried = torch.zeros_like(own)
        incoming = torch.empty_like(own)
        for turn in range(group.size):
            if turn < group.size - 1:
                keys_ring.start(held, arriving)
            source = (group.rank - turn) % group.size
            blocks = list(_blocks(source, group, half, ctx.documents))
            of_blocks = [
                attend_backward(
                    output_gradient[queries, some],
                    (query[queries, some], held[0][keys, some], held[1][keys, some]),
                    output[queries, some],
                    log_sum[some, :, queries],
                    causal,
                    ctx.scale,
                )
                for some, queries, keys, causal in blocks
            ]
            if turn > 1:
                gradients_ring.wait()
                carried, incoming = incoming, carried
            target = own if turn == 0 else carried
            for (some, queries, keys, _), of_block in zip(blocks, of_blocks, strict=True):
                of_query[queries, some] += of_block[0]
                target[0][keys, some] += of_block[1]
                target[1][keys, some] += of_block[2]
            if turn > 0:
                gradients_ring.start(carried, incoming)
            if turn < group.size - 1:
                keys_ring.wait()
                held, arriving = arriving, held
        gradients_ring.wait()
        own += incoming
        of_key, of_value = own.to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None, None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *tables: Tensor,
    group: Group,
    scale: float | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Return the causal attention [s/c, b, heads, d] over the sequence. Collective over the context ranks.

    Args:
        query: Queries of this rank's early and late piece, [s/c, b, heads, d].
        key: Keys of the pieces.
        value: Values of the pieces.
        tables: Tables of a Rotary that rotates queries and keys first, or none.
        group: Ranks of the context axis.
        scale: Factor of the products of queries and keys, by default 1 / sqrt(d).
        documents: Boundaries of documents, which attention does not cross. None for full sequences.
    """
    if tables:
        query, key = rotate(query, *tables), rotate(key, *tables)
    result: Tensor = _RingAttention.apply(query, key, value, group, scale, documents)
    return result
