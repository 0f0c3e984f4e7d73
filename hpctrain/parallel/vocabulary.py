"""Embedding and output layer split over the vocabulary (Megatron-LM, arXiv 1909.08053).

Each of t tensor ranks holds a range of the rows of the table [V, h]. With V = 10 and 2 ranks, rank 0 holds
rows 0 to 4 and rank 1 rows 5 to 9. A rank looks up the tokens in its range and sums with the others; its
logits are those of its range. The last rows may be padding, which is never looked up and never predicted.

No rank ever holds all logits. The head computes losses of chunks of tokens and their gradients in the same
pass, so no logits are saved for the backward pass either: the forward pass saves the gradient of the hidden
states and adds the gradient of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from hpctrain.parallel.backward.autograd import apply_function
from hpctrain.parallel.fp8.matmul_choice import make_matmul
from hpctrain.parallel.kernels.logits import SplitLogits
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, MatrixSize
from hpctrain.parallel.shards import Parameter, Partition, Shard, gradient_of, split_shard

CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_GPU = 6_500_000, 1 << 26
"""Logits of one chunk on a rank: 26 MB in fp32, on GPUs 268 MB. Each chunk reads the table three times."""

TABLE_ROWS = 64
"""GPUs multiply a table several times slower if its rows are not a multiple of this."""

CHUNK_ROWS = 64
"""Smallest number of tokens in a chunk, so that its products stay efficient."""


def chunk_rows(tokens: int, rows: int, gpu: bool) -> int:
    """Return the number of tokens in a chunk of the loss.

    Chunks are as even as possible: one of a few tokens would read the table as often as the others.

    Args:
        tokens: Tokens of all chunks together.
        rows: Rows of the table on a rank.
        gpu: True on a GPU.
    """
    return even_chunk(tokens, max(CHUNK_ROWS, chunk_logits(gpu) // rows))


def chunk_logits(gpu: bool) -> int:
    """Return the largest number of logits in a chunk on a rank."""
    return CHUNK_ELEMENTS_ON_GPU if gpu else CHUNK_ELEMENTS


def even_chunk(tokens: int, largest: int) -> int:
    """Return the size of even chunks of `tokens`, none larger than `largest`."""
    chunks = -(-tokens // largest)
    return max(1, -(-tokens // max(1, chunks)))


def vocabulary_shard(name: str, vocabulary: int, hidden: int, layer_context: LayerContext) -> Shard:
    """Return this rank's shard of a table [vocabulary, hidden], padded to equal sizes on all ranks."""
    aligned = layer_context.tensor.size * layer_context.table_rows
    rows = -(-vocabulary // aligned) * layer_context.table_rows
    start = min(layer_context.tensor.rank * rows, vocabulary)
    return split_shard(name, Partition(vocabulary, start, rows), hidden)


class VocabularyEmbedding(nn.Module):
    """Lookup in a table [V, h] whose rows are split over the tensor axis.

    Args:
        table: Table of this rank, with a shard of `vocabulary_shard`.
        layer_context: Context of the layer.
        number: Number of this layer among those of this rank that look up rows of the table.
    """

    def __init__(self, table: Parameter, layer_context: LayerContext, number: int = 0) -> None:
        super().__init__()
        self.layer_context, self.number = layer_context, number
        self.shard = table.shard
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows [s, b, h] of token ids [s, b] int64. Collective over tensor ranks.

        Under sequence parallelism they are those of this rank's piece, [s/t, b, h].
        """
        result: Tensor = apply_function(_EmbeddingAutograd, tokens, self, self.table)
        return result

    def mark_gradient_added(self) -> None:
        """Report that one addition to the gradient of the table is complete. Subclasses may defer it."""
        self.table.mark_gradient_added()


class _EmbeddingAutograd(torch.autograd.Function):
    """Lookup of token ids [s, b] in this rank's rows [V/t, h], summed over tensor ranks to [s or s/t, b, h].

    Ids of other ranks' rows give zeros on this rank. The backward pass adds the gradient of the table to its
    buffer, and returns none.
    """

    @staticmethod
    @override
    def forward(ctx: Any, indices: Tensor, layer: VocabularyEmbedding, weight: Tensor) -> Tensor:
        ctx.layer = layer
        if layer.layer_context.tensor.size == 1:
            ctx.save_for_backward(indices)
            return functional.embedding(indices, weight)
        local = indices - layer.shard.start[0]
        outside = (local < 0) | (local >= layer.shard.extent[0])
        local = local.masked_fill(outside, 0)
        ctx.save_for_backward(local, outside)
        output = functional.embedding(local, weight).masked_fill_(outside.unsqueeze(-1), 0)
        return layer.layer_context.tensor_sum(output)

    @staticmethod
    @override
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[None, None, None]:
        layer: VocabularyEmbedding = ctx.layer
        if not layer.table.requires_grad:
            return None, None, None
        output_gradient = layer.layer_context.gather_sequence(output_gradient)
        table = layer.table
        has_own_buffer = layer.number < len(table.lookup_gradients)
        gradient = table.lookup_gradients[layer.number] if has_own_buffer else gradient_of(table)
        indices, *outside = ctx.saved_tensors
        rows = output_gradient.reshape(-1, output_gradient.shape[-1]).to(gradient.dtype)
        if outside:
            rows = rows.masked_fill(outside[0].reshape(-1, 1), 0)
        audit = layer.layer_context.products.active_audit
        if audit is not None and not has_own_buffer:
            audit.expect_lookup(table, gradient, indices.reshape(-1), rows)
        gradient.index_add_(0, indices.reshape(-1), rows)
        layer.mark_gradient_added()
        return None, None, None


ChunkLoss = Callable[[SplitLogits, slice, bool], tuple[Tensor, Tensor | None]]
"""Function of the logits of a chunk, of the tokens in it, and of whether gradients are needed.

It returns the losses [n] and, if needed, their gradient with respect to `SplitLogits.products`, in the dtype
of these products.
"""


class VocabularyHead(nn.Module):
    """Linear output layer [V, h] split over the vocabulary.

    Args:
        table: The head's own parameter, or the embedding's if the two are tied.
        layer_context: Context of the layer.
        multiplier: Factor of the products with the table, which gives the logits.
        cap: Bound c of the logits x, which become c tanh(x / c); 0 for none.

    Attributes:
        rows: Number of this rank's rows that are not padding.
    """

    def __init__(
        self, table: Parameter, layer_context: LayerContext, multiplier: float = 1.0, cap: float = 0.0
    ) -> None:
        super().__init__()
        self.layer_context, self.multiplier, self.cap = layer_context, multiplier, cap
        self.weight = (table,)  # in a tuple, so that a tied table is registered once, by its owner
        self.product = make_matmul(self.weight, layer_context)
        self.rows = table.shard.extent[0]

    @property
    def table(self) -> Parameter:
        """Matrix [V/t, h] of this rank."""
        return self.weight[0]

    def forward(self, hidden: Tensor, chunk_loss: ChunkLoss) -> Tensor:
        """Return the sum of the losses of all tokens, fp32. Collective over tensor ranks.

        In training, the forward pass already computes the gradient of `hidden` from the gradients that
        `chunk_loss` returns, and adds the gradient of the table to its buffer. So the backward pass must
        start here, with a gradient of one.

        Args:
            hidden: Hidden states [s or s/t, b, h].
            chunk_loss: Computes the losses of a chunk of tokens.
        """
        training = torch.is_grad_enabled()
        loss: Tensor = _HeadLossAutograd.apply(hidden, self, chunk_loss, training, self.table)
        return loss

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits [s, b, V] of hidden states [s or s/t, b, h]. Collective over tensor ranks.

        They have the bits that a loss computes with, and are in fp32 if they are scaled.
        """
        tensor = self.layer_context.tensor
        sequence = self.layer_context.gather_sequence(hidden)
        local: Tensor = self.product.logits(sequence.flatten(0, -2)).view(*sequence.shape[:-1], -1)
        if self.multiplier != 1:
            local = local.float() * self.multiplier  # in fp32, as in a loss
        if self.cap:
            local = (local.float() / self.cap).tanh() * self.cap
        if tensor.size > 1:
            local = tensor.all_gather(local.permute(2, 0, 1).contiguous()).permute(1, 2, 0)
        return local[..., : self.table.shard.shape[0]]

    @property
    def matrix(self) -> MatrixSize:
        """Global matrix that hidden states are multiplied with."""
        rows, hidden = self.table.shard.shape
        return MatrixSize(rows, hidden, "outputs")

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations on the logits."""
        return [ElementwiseSize("loss", self.table.shard.shape[0], True)]


class _HeadLossAutograd(torch.autograd.Function):
    """Sum of the losses of all tokens, with logits of a chunk of tokens at a time.

    In training the forward pass already computes the gradient of `hidden`, and adds that of the table to its
    buffer, so that no logits are saved. The backward pass must start here, with a gradient of one.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, hidden: Tensor, head: VocabularyHead, chunk_loss: ChunkLoss, training: bool, _: Tensor
    ) -> Tensor:
        table, product = head.table, head.product
        sequence = head.layer_context.gather_sequence(hidden)
        rows = sequence.reshape(-1, sequence.shape[-1])
        gradient = torch.empty_like(rows) if training else None
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        count = chunk_rows(rows.shape[0], table.shape[0], not rows.is_cpu)
        for start in range(0, rows.shape[0], count):
            part = slice(start, start + count)
            losses, logits_gradient = chunk_loss(
                SplitLogits(product.logits(rows[part]), head.rows, head.multiplier, head.cap),
                part,
                training,
            )
            loss += losses.sum()
            if gradient is not None and logits_gradient is not None:
                product.input_gradient(logits_gradient, gradient[part])
                if table.requires_grad:
                    product.add_weight_gradient(logits_gradient, rows[part])
            del logits_gradient  # the next chunk's logits may use this memory
        ctx.head = head
        if gradient is not None:
            ctx.save_for_backward(gradient.view_as(sequence))
        return loss

    @staticmethod
    @override
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        head: VocabularyHead = ctx.head
        (gradient,) = ctx.saved_tensors
        gradient = head.layer_context.tensor_sum(gradient)
        if head.table.requires_grad:
            head.table.mark_gradient_added()
        return gradient, None, None, None, None
