"""Attention of complete sequences, or of documents packed in them, by tiles: with windows, caps or sinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import (
    AttentionRule,
    Mask,
    PartialAttention,
    shift_slice,
    sinks_gradient,
)


def _blocks(
    query: Tensor, rule: AttentionRule, documents: Documents | None
) -> Iterator[tuple[slice, slice, slice, Mask]]:
    """Yield the rows of the batch, the queries, the keys and the mask of each tile."""
    rows, batch = query.shape[:2]
    pieces: Any = [(None, 0, rows)] if documents is None else documents.pieces
    for row, begin, end in pieces:
        batch_rows = slice(0, batch) if row is None else slice(row, row + 1)
        for queries, keys, mask in rule.tiles(query, end - begin, end - begin):
            yield batch_rows, shift_slice(queries, begin), shift_slice(keys, begin), mask


class _TiledAttention(torch.autograd.Function):
    """`tiled_attention`: tiles of queries and keys, whose results merge by their log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        rule: AttentionRule,
        documents: Documents | None,
    ) -> Tensor:
        partial = PartialAttention(query, value.shape[-1])
        for batch_rows, queries, keys, mask in _blocks(query, rule, documents):
            part = rule.attend(
                query[queries, batch_rows], key[keys, batch_rows], value[keys, batch_rows], mask
            )
            partial.add(queries, batch_rows, part)
        if sinks is not None:
            partial.add_sinks(sinks)
        ctx.rule, ctx.documents = rule, documents
        output = partial.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, partial.log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        rule: AttentionRule = ctx.rule
        gradients = [torch.zeros_like(x, dtype=log_sum.dtype) for x in (query, key, value)]
        for batch_rows, queries, keys, mask in _blocks(query, rule, ctx.documents):
            operands = query[queries, batch_rows], key[keys, batch_rows], value[keys, batch_rows]
            parts = rule.attend_backward(
                output_gradient[queries, batch_rows],
                operands,
                output[queries, batch_rows],
                log_sum[batch_rows, :, queries],
                mask,
            )
            for gradient, rows, part in zip(gradients, (queries, keys, keys), parts, strict=True):
                gradient[rows, batch_rows] += part
        dq, dk, dv = (gradient.to(query.dtype) for gradient in gradients)
        sinks_gradients = None if sinks is None else sinks_gradient(output_gradient, output, log_sum, sinks)
        return dq, dk, dv, sinks_gradients, None, None


def tiled_attention(inputs: AttentionInputs, rule: AttentionRule) -> Tensor:
    """Return the causal attention [s, b, heads, d] of complete sequences, whose queries and keys are rotated.

    Args:
        inputs: Queries, keys and values, maybe with sinks and documents.
        rule: Scale, window and soft cap.
    """
    query, key, value, sinks, _, documents = inputs
    result: Tensor = _TiledAttention.apply(query, key, value, sinks, rule, documents)
    return result
