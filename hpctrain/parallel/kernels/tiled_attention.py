"""Attention of complete sequences, or of documents packed in them, by tiles: with windows, caps or sinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.parallel.kernels.attention_tiles import Attended, AttentionRule, Mask, shifted, sinks_gradient


def _blocks(
    query: Tensor, rule: AttentionRule, documents: Documents | None
) -> Iterator[tuple[slice, slice, slice, Mask]]:
    """Yield the rows of the batch, the queries, the keys and the mask of each tile."""
    rows, batch = query.shape[:2]
    pieces: Any = [(None, 0, rows)] if documents is None else documents.pieces
    for row, begin, end in pieces:
        some = slice(0, batch) if row is None else slice(row, row + 1)
        for queries, keys, mask in rule.tiles(query, end - begin, end - begin):
            yield some, shifted(queries, begin), shifted(keys, begin), mask


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
        attended = Attended(query, value.shape[-1])
        for some, queries, keys, mask in _blocks(query, rule, documents):
            part = rule.attend(query[queries, some], key[keys, some], value[keys, some], mask)
            attended.add(queries, some, part)
        if sinks is not None:
            attended.add_sinks(sinks)
        ctx.rule, ctx.documents = rule, documents
        output = attended.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, attended.log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        rule: AttentionRule = ctx.rule
        gradients = [torch.zeros_like(x, dtype=log_sum.dtype) for x in (query, key, value)]
        for some, queries, keys, mask in _blocks(query, rule, ctx.documents):
            operands = query[queries, some], key[keys, some], value[keys, some]
            parts = rule.attend_backward(
                output_gradient[queries, some],
                operands,
                output[queries, some],
                log_sum[some, :, queries],
                mask,
            )
            for gradient, rows, part in zip(gradients, (queries, keys, keys), parts, strict=True):
                gradient[rows, some] += part
        dq, dk, dv = (gradient.to(query.dtype) for gradient in gradients)
        of_sinks = None if sinks is None else sinks_gradient(output_gradient, output, log_sum, sinks)
        return dq, dk, dv, of_sinks, None, None


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: AttentionRule,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the causal attention [s, b, heads, d] of complete sequences by a rule.

    Args:
        query: Queries [s, b, heads, d].
        key: Keys, which may have fewer heads.
        value: Values, as many as keys.
        rule: How weights follow from queries and keys.
        documents: Boundaries of documents, which attention does not cross. None for full sequences.
        sinks: Score [heads] of a key with the value zero that all queries of a head see; None without one.
    """
    result: Tensor = _TiledAttention.apply(query, key, value, sinks, rule, documents)
    return result
