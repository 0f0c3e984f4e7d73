"""Attention of complete sequences, or of documents packed in them, by tiles: with windows, caps or sinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def _blocks(query: Tensor, rule: AttentionRule, documents: Documents | None) -> Iterator[AttentionBlock]:
    """Yield the tiles of complete sequences, or of each document."""
    rows, batch = query.shape[:2]
    for sequences, begin, end in separate_sequences(documents, batch, rows):
        for tile in rule.tiles(query, end - begin, end - begin):
            yield tile.placed(sequences, begin, begin)


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
        for batch, queries, keys, mask in _blocks(query, rule, documents):
            operands = query[queries, batch], key[keys, batch], value[keys, batch]
            partial.add(queries, batch, *rule.attend(*operands, mask))
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
        for batch, queries, keys, mask in _blocks(query, rule, ctx.documents):
            operands = query[queries, batch], key[keys, batch], value[keys, batch]
            parts = rule.attend_backward(
                output_gradient[queries, batch],
                operands,
                output[queries, batch],
                log_sum[batch, :, queries],
                mask,
            )
            for gradient, rows, part in zip(gradients, (queries, keys, keys), parts, strict=True):
                gradient[rows, batch] += part
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
