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
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.data.documents import Documents
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs, separate_sequences
from hpctrain.parallel.kernels.attention_tiles import (
    AttentionBlock,
    AttentionRule,
    Mask,
    PartialAttention,
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
    """Return which of this rank's queries see which keys of rank `source`, and the mask between these."""
    early, late, both = slice(0, half), slice(half, 2 * half), slice(0, 2 * half)
    if source == rank:
        return both, both, "causal"
    return (both, early, "none") if source < rank else (late, both, "none")


def _piece_starts(rank: int, ranks: int, half: int) -> tuple[int, int]:
    """Return the positions at which the early and the late piece of a rank start."""
    return rank * half, (2 * ranks - 1 - rank) * half


def _rows_before(position: int, rank: int, ranks: int, half: int) -> int:
    """Return how many rows of a rank are before a position of the sequence."""
    return sum(min(max(position - start, 0), half) for start in _piece_starts(rank, ranks, half))


class _RingOptions(NamedTuple):
    """Arguments of ring attention that are no tensors."""

    group: Group
    rule: AttentionRule
    documents: Documents | None

    def blocks(self, source: int, query: Tensor) -> Iterator[AttentionBlock]:
        """Yield the blocks in which this rank's queries see keys of rank `source`, maybe none."""
        return self._tiles(source, query) if self.rule.needs_tiles else self._large_blocks(source, query)

    def _sequences(self, query: Tensor) -> Iterator[tuple[slice, int, int]]:
        return separate_sequences(self.documents, query.shape[1], len(query) * self.group.size)

    def _large_blocks(self, source: int, query: Tensor) -> Iterator[AttentionBlock]:
        """Yield one block, or one for each document.

        The rows that a rank has of a document are consecutive, even if they are of both its pieces.
        """
        rank, half = self.group.rank, len(query) // 2
        queries, keys, mask = _visible(source, rank, half)
        for batch, begin, end in self._sequences(query):
            query_rows = self._rows_between(begin, end, rank, half, queries)
            key_rows = self._rows_between(begin, end, source, half, keys)
            if query_rows.start < query_rows.stop and key_rows.start < key_rows.stop:
                yield AttentionBlock(query_rows, key_rows, mask, batch)

    def _rows_between(self, begin: int, end: int, rank: int, half: int, visible: slice) -> slice:
        """Return which of the visible rows of a rank have positions from `begin` on and before `end`."""
        rows = (_rows_before(position, rank, self.group.size, half) for position in (begin, end))
        return slice(*(min(max(row, visible.start), visible.stop) for row in rows))

    def _tiles(self, source: int, query: Tensor) -> Iterator[AttentionBlock]:
        """Yield the tiles of the rule between both pieces of this rank and both of rank `source`."""
        rank, ranks, half = self.group.rank, self.group.size, len(query) // 2
        starts = [tuple(enumerate(_piece_starts(each, ranks, half))) for each in (rank, source)]
        for (batch, begin, end), (query_piece, first_query), (key_piece, first_key) in product(
            self._sequences(query), *starts
        ):
            queries = range(max(begin, first_query), min(end, first_query + half))
            keys = range(max(begin, first_key), min(end, first_key + half))
            if not queries or not keys or keys[0] > queries[-1]:
                continue
            query_row = queries[0] - first_query + query_piece * half
            key_row = keys[0] - first_key + key_piece * half
            for tile in self.rule.tiles(query, len(queries), len(keys), queries[0] - keys[0]):
                yield tile.shift(batch, query_row, key_row)


class _RingAttention(torch.autograd.Function):
    """Ring attention of queries, keys and values [s/c, b, heads, d], which are already rotated.

    Saves inputs, output and log-sum-exps, so keys and values travel around the ring again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, options: _RingOptions
    ) -> Tensor:
        ctx.options, group = options, options.group
        current_kv = torch.stack((key, value))
        next_kv = torch.empty_like(current_kv)
        ring = _Ring(group, _KEYS)
        # Without tiles every query sees some of this rank's own keys, whose results are stored, not merged.
        stores_first = not options.rule.needs_tiles
        partial = PartialAttention(query, value.shape[-1], not stores_first)
        for turn in range(group.size):
            if turn < group.size - 1:
                ring.start(current_kv, next_kv)
            source = (group.rank - turn) % group.size
            include = partial.store if stores_first and turn == 0 else partial.add
            for block in options.blocks(source, query):
                include(block, *options.rule.attend_block(block, query, current_kv[0], current_kv[1]))
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
        options: _RingOptions = ctx.options
        group = options.group
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        current_kv = torch.stack((key, value))
        next_kv = torch.empty_like(current_kv)
        keys_ring, gradients_ring = _Ring(group, _KEYS), _Ring(group, _GRADIENTS)
        query_gradient = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        local_gradient = torch.zeros(current_kv.shape, dtype=torch.float32, device=query.device)
        # The sum for a rank's keys starts at its successor and returns to the rank in the last round.
        carried = torch.zeros_like(local_gradient)
        incoming = torch.empty_like(local_gradient)
        for turn in range(group.size):
            if turn < group.size - 1:
                keys_ring.start(current_kv, next_kv)
            source = (group.rank - turn) % group.size
            blocks = list(options.blocks(source, query))
            operands = query, current_kv[0], current_kv[1]
            block_gradients = [
                options.rule.attend_block_backward(block, output_gradient, operands, output, log_sum)
                for block in blocks
            ]
            if turn > 1:
                gradients_ring.wait()
                carried, incoming = incoming, carried
            key_value_gradient = local_gradient if turn == 0 else carried
            for (queries, keys, _, batch), (dq, dk, dv) in zip(blocks, block_gradients, strict=True):
                query_gradient[queries, batch] += dq
                key_value_gradient[0, keys, batch] += dk
                key_value_gradient[1, keys, batch] += dv
            if turn > 0:
                gradients_ring.start(carried, incoming)
            if turn < group.size - 1:
                keys_ring.wait()
                current_kv, next_kv = next_kv, current_kv
        gradients_ring.wait()
        local_gradient += incoming
        key_gradient, value_gradient = local_gradient.to(key.dtype)
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
    result: Tensor = _RingAttention.apply(query, key, value, sinks, _RingOptions(group, rule, documents))
    return result
