"""Attention that stays within documents, several of which are packed in a sequence.

Each document is computed as one that is alone: by the kernels that whole sequences take, so that work grows
with the squares of documents' lengths, and nothing is computed to be masked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.parallel.attention.block import attend, attend_backward


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None
    ) -> Tensor:
        rows, batch, heads, _ = query.shape
        output = query.new_empty(query.shape)
        log_sum = query.new_empty(batch, heads, rows, dtype=torch.promote_types(query.dtype, torch.float32))
        for row, begin, end in documents.pieces:
            at = slice(begin, end), slice(row, row + 1)
            output[at], log_sum[row : row + 1, :, begin:end] = attend(
                query[at], key[at], value[at], True, scale
            )
        ctx.documents, ctx.scale = documents, scale
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, log_sum = ctx.saved_tensors
        of_query, of_key, of_value = (x.new_empty(x.shape) for x in (query, key, value))
        for row, begin, end in ctx.documents.pieces:
            at = slice(begin, end), slice(row, row + 1)
            of_query[at], of_key[at], of_value[at] = attend_backward(
                output_gradient[at],
                query[at],
                key[at],
                value[at],
                output[at],
                log_sum[row : row + 1, :, begin:end],
                True,
                ctx.scale,
            )
        return of_query, of_key, of_value, None, None


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None = None
) -> Tensor:
    """Causal attention of [s, b, heads, d] tensors of whole sequences within each of their documents.

    `scale` as in `attend`.
    """
    result: Tensor = _DocumentAttention.apply(query, key, value, documents, scale)
    return result
