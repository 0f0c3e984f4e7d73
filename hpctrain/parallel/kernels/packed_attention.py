"""Attention within documents, several of which are packed in a sequence.

Each document is one block, computed by the kernels for complete sequences. So the work grows with the squares
of the lengths of documents, and nothing is computed that a mask would discard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.parallel.kernels.attention_block import attend, attend_backward
from hpctrain.parallel.kernels.attention_inputs import separate_sequences


class _DocumentAttention(torch.autograd.Function):
    """`document_attention`: each document is a block with its own forward and backward kernel."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float
    ) -> Tensor:
        rows, batch, heads, _ = query.shape
        output = query.new_empty(query.shape)
        log_sum = query.new_empty(batch, heads, rows, dtype=torch.promote_types(query.dtype, torch.float32))
        for sequences, begin, end in separate_sequences(documents, batch, rows):
            document = slice(begin, end), sequences
            output[document], log_sum[sequences, :, begin:end] = attend(
                query[document], key[document], value[document], True, scale
            )
        ctx.documents, ctx.scale = documents, scale
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, log_sum = ctx.saved_tensors
        gradients = [x.new_empty(x.shape) for x in (query, key, value)]
        rows, batch = query.shape[:2]
        for sequences, begin, end in separate_sequences(ctx.documents, batch, rows):
            document = slice(begin, end), sequences
            document_gradients = attend_backward(
                output_gradient[document],
                (query[document], key[document], value[document]),
                output[document],
                log_sum[sequences, :, begin:end],
                True,
                ctx.scale,
            )
            for gradient, document_gradient in zip(gradients, document_gradients, strict=True):
                gradient[document] = document_gradient
        return gradients[0], gradients[1], gradients[2], None, None


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float
) -> Tensor:
    """Return the causal attention of complete sequences within each of their documents.

    Args:
        query: Queries [s, b, heads, d].
        key: Keys, which may have fewer heads.
        value: Values, as many as keys.
        documents: Boundaries of the documents.
        scale: Factor of the products of queries and keys.
    """
    result: Tensor = _DocumentAttention.apply(query, key, value, documents, scale)
    return result
