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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.data.documents import Documents
from hpctrain.parallel.kernels.attention_block import merge
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import (
    AttentionRule,
    Mask,
    PartialAttention,
    shift_slice,
    sinks_gradient,
)

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


def _visible(source: int, rank: int, half: int) -> tuple[slice, slice, Mask]:
    """Return which queries see which keys of rank `source`, and the mask between these."""
    if source == rank:
        return slice(None), slice(None), "causal"
    if source < rank:
        return slice(None), slice(0, half), "none"
    return slice(half, None), slice(None), "none"


def _rows_before(position: int, rank: int, ranks: int, half: int) -> int:
    """Return how many rows of a rank are before a position of the sequence."""
    early, late = rank * half, (2 * ranks - 1 - rank) * half
    return min(max(position - early, 0), half) + min(max(position - late, 0), half)


Block = tuple[slice, slice, slice, Mask]
"""Rows of the batch, of the queries and of the keys, and the mask between these."""


def _blocks(source: int, group: Group, half: int, documents: Documents | None) -> Iterator[Block]:
    """Yield the blocks in which this rank's queries see keys of rank `source`: one, or one for each document.

    The rows that a rank has of a document are consecutive, even if they are of both its pieces.
    """
    rank, ranks = group.rank, group.size
    queries, keys, mask = _visible(source, rank, half)
    if documents is None:
        yield slice(None), queries, keys, mask
        return
    for row, begin, end in documents.pieces:
        found = []
        for holder, visible in ((rank, queries), (source, keys)):
            first, last, _ = visible.indices(2 * half)
            own = (_rows_before(place, holder, ranks, half) for place in (begin, end))
            found.append(slice(*(min(max(place, first), last) for place in own)))
        if all(each.start < each.stop for each in found):
            yield slice(row, row + 1), found[0], found[1], mask


def _pieces(rank: int, group: Group, half: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (first position, first local row) of the early and the late piece."""
    return (rank * half, 0), ((2 * group.size - 1 - rank) * half, half)


class _Options(NamedTuple):
    """Non-tensor arguments of ring attention."""

    group: Group
    rule: AttentionRule
    documents: Documents | None

    def blocks(self, source: int, query: Tensor) -> Iterator[Block]:
        """Yield the blocks in which this rank's queries see keys of rank `source`."""
        if self.rule.needs_tiles:
            return _tiles(source, query, self)
        return _blocks(source, self.group, len(query) // 2, self.documents)


def _tiles(source: int, query: Tensor, options: _Options) -> Iterator[Block]:
    """Yield the tiles in which this rank's queries see keys of rank `source` by a rule, maybe none."""
    group, rule, documents = options
    half = len(query) // 2
    sequence_length = 2 * group.size * half
    pieces: Any = [(None, 0, sequence_length)] if documents is None else documents.pieces
    for row, begin, end in pieces:
        batch_rows = slice(None) if row is None else slice(row, row + 1)
        for first_query, query_at in _pieces(group.rank, group, half):
            for first_key, key_at in _pieces(source, group, half):
                queries = range(max(begin, first_query), min(end, first_query + half))
                keys = range(max(begin, first_key), min(end, first_key + half))
                if not queries or not keys or keys[0] > queries[-1]:
                    continue
                of_queries, of_keys = queries[0] - first_query + query_at, keys[0] - first_key + key_at
                for tile in rule.tiles(query, len(queries), len(keys), queries[0] - keys[0]):
                    yield (
                        batch_rows,
                        shift_slice(tile.queries, of_queries),
                        shift_slice(tile.keys, of_keys),
                        tile.mask,
                    )


class _RingAttention(torch.autograd.Function):
    """Ring attention of queries, keys and values [s/c, b, heads, d], which are already rotated.

    Saves inputs, output and log-sum-exps, so keys and values travel around the ring again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, options: _Options
    ) -> Tensor:
        ctx.options, group = options, options.group
        current_kv = torch.stack((key, value))
        next_kv = torch.empty_like(current_kv)
        ring = _Ring(group, _KEYS)
        partial = PartialAttention(query, value.shape[-1], initialized=options.rule.needs_tiles)
        output, log_sum = partial.output, partial.log_sum
        for turn in range(group.size):
            if turn < group.size - 1:
                ring.start(current_kv, next_kv)
            source = (group.rank - turn) % group.size
            for batch_rows, queries, keys, mask in options.blocks(source, query):
                part = options.rule.attend(
                    query[queries, batch_rows],
                    current_kv[0][keys, batch_rows],
                    current_kv[1][keys, batch_rows],
                    mask,
                )
                accumulator = output[queries, batch_rows], log_sum[batch_rows, :, queries]
                if (
                    turn == 0 and not options.rule.needs_tiles
                ):  # with its own keys, of which every query sees some
                    for target, update in zip(accumulator, part, strict=True):
                        target.copy_(update)
                else:
                    merge(*accumulator, *part)
            if turn < group.size - 1:
                ring.wait()
                current_kv, next_kv = next_kv, current_kv
        if sinks is not None:
            partial.add_sinks(sinks)
        result = partial.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, partial.log_sum)
        return result

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        options: _Options = ctx.options
        group = options.group
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        current_kv = torch.stack((key, value))
        next_kv = torch.empty_like(current_kv)
        keys_ring, gradients_ring = _Ring(group, _KEYS), _Ring(group, _GRADIENTS)
        query_gradient = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        own = torch.zeros(current_kv.shape, dtype=torch.float32, device=query.device)
        # The sum for a rank's keys starts at its successor and returns to the rank in the last round.
        carried = torch.zeros_like(own)
        incoming = torch.empty_like(own)
        for turn in range(group.size):
            if turn < group.size - 1:
                keys_ring.start(current_kv, next_kv)
            source = (group.rank - turn) % group.size
            blocks = list(options.blocks(source, query))
            block_gradients = [
                options.rule.attend_backward(
                    output_gradient[queries, batch_rows],
                    (
                        query[queries, batch_rows],
                        current_kv[0][keys, batch_rows],
                        current_kv[1][keys, batch_rows],
                    ),
                    output[queries, batch_rows],
                    log_sum[batch_rows, :, queries],
                    mask,
                )
                for batch_rows, queries, keys, mask in blocks
            ]
            if turn > 1:
                gradients_ring.wait()
                carried, incoming = incoming, carried
            target = own if turn == 0 else carried
            for (batch_rows, queries, keys, _), block_gradient in zip(blocks, block_gradients, strict=True):
                query_gradient[queries, batch_rows] += block_gradient[0]
                target[0][keys, batch_rows] += block_gradient[1]
                target[1][keys, batch_rows] += block_gradient[2]
            if turn > 0:
                gradients_ring.start(carried, incoming)
            if turn < group.size - 1:
                keys_ring.wait()
                current_kv, next_kv = next_kv, current_kv
        gradients_ring.wait()
        own += incoming
        key_gradient, value_gradient = own.to(key.dtype)
        sinks_gradients = None if sinks is None else sinks_gradient(output_gradient, output, log_sum, sinks)
        return query_gradient.to(query.dtype), key_gradient, value_gradient, sinks_gradients, None


def ring_attention(inputs: AttentionInputs, group: Group, rule: AttentionRule) -> Tensor:
    """Return the causal attention [s/c, b, heads, d] over the sequence. Collective over the context ranks.

    Args:
        inputs: Queries, keys and values of this rank's early and late piece.
        group: Ranks of the context axis.
        rule: Scale, window and soft cap.
    """
    query, key, value, sinks, _, documents = inputs.rotated()
    result: Tensor = _RingAttention.apply(query, key, value, sinks, _Options(group, rule, documents))
    return result
