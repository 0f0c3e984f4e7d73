"""Attention of complete sequences by blocks: within documents that are packed in them, or by tiles.

Without a window or a cap, each document is one block. So the work grows with the squares of the lengths of
documents, and nothing is computed that a mask would discard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs, separate_sequences
from hpctrain.parallel.kernels.attention_tiles import (
    AttentionBlock,
    AttentionRule,
    PartialAttention,
    sinks_gradient,
)


def blockwise_attention(inputs: AttentionInputs, rule: AttentionRule) -> Tensor:
    """Return the causal attention [s, b, heads, d] of complete sequences, whose queries and keys are rotated.

    Args:
        inputs: Queries, keys and values, maybe with sinks and documents.
        rule: Scale, window and soft cap.
    """
    query, key, value, sinks, _, documents = inputs
    merges = rule.needs_tiles or sinks is not None
    result: Tensor = _BlockwiseAttention.apply(query, key, value, sinks, _Blocks(rule, documents, merges))
    return result


class _Blocks(NamedTuple):
    """Blocks of a blockwise attention.

    Attributes:
        rule: Scale, window and soft cap.
        documents: Boundaries of documents. None for full sequences.
        merges: True if results of blocks are merged or added in fp32. Otherwise every query is in one block,
            and results are stored in the format of the queries.
    """

    rule: AttentionRule
    documents: Documents | None
    merges: bool

    def of(self, query: Tensor) -> Iterator[AttentionBlock]:
        """Yield the blocks of queries [s, b, heads, d] and the keys that they see."""
        rows, batch = query.shape[:2]
        for sequences, begin, end in separate_sequences(self.documents, batch, rows):
            for tile in self.rule.tiles(query, end - begin, end - begin):
                yield tile.shift(sequences, begin, begin)


class _BlockwiseAttention(torch.autograd.Function):
    """`blockwise_attention`. Saves inputs, output and log-sum-exps, but no scores."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, blocks: _Blocks
    ) -> Tensor:
        partial = PartialAttention(query, value.shape[-1], blocks.merges, rounded=not blocks.merges)
        include = partial.add if blocks.merges else partial.store
        for block in blocks.of(query):
            include(block, *blocks.rule.attend_block(block, query, key, value))
        if sinks is not None:
            partial.add_sinks(sinks)
        output = partial.output.to(query.dtype)
        ctx.blocks = blocks
        ctx.save_for_backward(query, key, value, sinks, output, partial.log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        if blocks.merges:
            gradients = [torch.zeros_like(x, dtype=log_sum.dtype) for x in (query, key, value)]
        else:
            gradients = [x.new_empty(x.shape) for x in (query, key, value)]
        for block in blocks.of(query):
            queries, keys, _, batch = block
            block_gradients = blocks.rule.attend_block_backward(
                block, output_gradient, (query, key, value), output, log_sum
            )
            for gradient, rows, block_gradient in zip(
                gradients, (queries, keys, keys), block_gradients, strict=True
            ):
                if blocks.merges:
                    gradient[rows, batch] += block_gradient
                else:
                    gradient[rows, batch] = block_gradient
        dq, dk, dv = (gradient.to(query.dtype) for gradient in gradients)
        sinks_gradients = None if sinks is None else sinks_gradient(output_gradient, output, log_sum, sinks)
        return dq, dk, dv, sinks_gradients, None
