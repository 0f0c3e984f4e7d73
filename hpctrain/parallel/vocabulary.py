"""Embedding and head split over the vocabulary (Megatron-LM, arXiv 1909.08053).

Every rank of the tensor axis holds `ceil(V / t)` rows, on GPUs a multiple of TABLE_ROWS; the last rows may
be padding, which is never looked up and never predicted. No rank ever holds the full logits: losses are
taken of chunks of tokens, and their gradients computed in the same pass, so that no logits are kept for
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage
from hpctrain.parallel.autograd import apply_function
from hpctrain.parallel.kernels.logits import SplitLogits
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul_choice import make_matmul
from hpctrain.parallel.operations import ElementwiseSize, MatrixSize
from hpctrain.parallel.shards import Parameter, Shard

CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_GPU = 6_500_000, 1 << 26
"""Logits of one chunk, per rank: 26 MB in fp32, on GPUs 268 MB. Each takes three passes over the table."""

TABLE_ROWS = 64
"""By a table of another number of rows GPUs multiply several times slower."""

CHUNK_ROWS = 64
"""Tokens of a chunk at the least, so that its products stay efficient."""


def chunk_rows(tokens: int, rows: int, gpu: bool) -> int:
    """Tokens of a chunk of the loss, of `tokens` in all, where a rank holds `rows` of the table.

    Chunks are as even as can be: one of a few tokens would take as many passes as the others.
    """
    return chunk_of(tokens, max(CHUNK_ROWS, logits_of_chunk(gpu) // rows))


def logits_of_chunk(gpu: bool) -> int:
    """How many of them are computed at a time, on a rank."""
    return CHUNK_ELEMENTS_ON_GPU if gpu else CHUNK_ELEMENTS


def chunk_of(tokens: int, most: int) -> int:
    """Tokens of an even chunk of so many, of `most` at the most."""
    chunks = -(-tokens // most)
    return max(1, -(-tokens // max(1, chunks)))


def vocabulary_shard(name: str, vocabulary: int, hidden: int, groups: LayerContext) -> Shard:
    """This rank's rows of a [vocabulary, hidden] tensor, padded to divide."""
    aligned = groups.tensor.size * groups.table_rows
    rows = -(-vocabulary // aligned) * groups.table_rows
    return Shard(
        name,
        (vocabulary, hidden),
        (min(groups.tensor.rank * rows, vocabulary), 0),
        (rows, hidden),
        split=frozenset({"tensor"}),
    )


class _EmbeddingAutograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, layer: VocabularyEmbedding, weight: Tensor) -> Tensor:
        ctx.layer = layer
        if layer.groups.tensor.size == 1:
            ctx.save_for_backward(indices)
            return functional.embedding(indices, weight)
        local = indices - layer.shard.start[0]
        outside = (local < 0) | (local >= layer.shard.extent[0])
        local = local.masked_fill(outside, 0)
        ctx.save_for_backward(local, outside)
        output = functional.embedding(local, weight).masked_fill_(outside.unsqueeze(-1), 0)
        return layer.groups.sum(output)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[None, None, None]:
        layer: VocabularyEmbedding = ctx.layer
        if not layer.table.requires_grad:
            return None, None, None
        output_gradient = layer.groups.gathered(output_gradient)
        table = layer.table
        gradient = table.lookups if table.lookups is not None else table.gradient
        assert gradient is not None
        indices, *outside = ctx.saved_tensors
        rows = output_gradient.reshape(-1, output_gradient.shape[-1]).to(gradient.dtype)
        if outside:
            rows = rows.masked_fill(outside[0].reshape(-1, 1), 0)
        audit = layer.groups.audit
        if audit is not None and audit.active and table.lookups is None:
            audit.expect_lookup(table, gradient, indices.reshape(-1), rows)
        gradient.index_add_(0, indices.reshape(-1), rows)
        layer.added()
        return None, None, None


class VocabularyEmbedding(nn.Module):
    """Rows of a table [V, h], split over the tensor axis.

    `forward` takes token ids [s, b] and gives [s, b, h], or [s/t, b, h] under sequence parallelism.
    """

    def __init__(self, table: Parameter, groups: LayerContext) -> None:
        super().__init__()
        self.groups = groups
        self.shard = table.shard
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        """[s, b] int64 -> [s or s/t, b, h]."""
        result: Tensor = apply_function(_EmbeddingAutograd, tokens, self, self.table)
        return result

    def added(self) -> None:
        """Tell that one addition to the table's gradient is complete."""
        self.table.added()


ChunkLoss = Callable[[SplitLogits, slice, bool], tuple[Tensor, Tensor | None]]
"""Losses [n] of a chunk of tokens, and when learning the gradient [n, V/t] of the products that its logits
are made of, as stored: of the rank's logits, and of which tokens these are.
"""


class VocabularyHead(nn.Module):
    """A linear head [V, h] split over the vocabulary.

    `table` is the head's own parameter, or the embedding's where the two are tied. Logits are the products
    times `multiplier`.
    """

    def __init__(self, table: Parameter, groups: LayerContext, multiplier: float = 1.0) -> None:
        super().__init__()
        self.groups, self.multiplier = groups, multiplier
        self.weight = (table,)  # in a tuple, so that a tied table is registered once, by its owner
        self.product = make_matmul(self.weight, groups)
        self.rows = table.shard.extent[0]

    @property
    def table(self) -> Parameter:
        """The matrix [V/t, h]."""
        return self.weight[0]

    def forward(self, hidden: Tensor, of_chunk: ChunkLoss) -> Tensor:
        """Sum over tokens of the losses that `of_chunk` finds, fp32, of hidden [s or s/t, b, h].

        The gradients are those that it gives: start backward here with a gradient of one.
        """
        learning = torch.is_grad_enabled()
        loss: Tensor = _HeadLossAutograd.apply(hidden, self, of_chunk, learning, self.table)
        return loss

    def logits(self, hidden: Tensor) -> Tensor:
        """Whole logits [s, b, V] of hidden [s or s/t, b, h], for sampling; in fp32 where they are scaled."""
        tensor = self.groups.tensor
        whole = self.groups.gathered(hidden)
        # As the loss does: its logits have these bits.
        local: Tensor = self.product.logits(whole.flatten(0, -2)).view(*whole.shape[:-1], -1)
        if self.multiplier != 1:
            local = local.float() * self.multiplier  # rounded no more than in a loss
        if tensor.size > 1:
            local = tensor.all_gather(local.permute(2, 0, 1).contiguous()).permute(1, 2, 0)
        return local[..., : self.table.shard.shape[0]]

    @property
    def matrix(self) -> MatrixSize:
        """What hidden states are multiplied with."""
        rows, hidden = self.table.shard.shape
        return MatrixSize(rows, hidden, "outputs")

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """What is done to the logits."""
        return [ElementwiseSize("loss", self.table.shard.shape[0], True)]

    def saved(self, at: ActivationSizes) -> SavedStorage:
        """The gradient of the hidden states, which is computed in the forward pass."""
        return at.features(self.table.shard.shape[1])

    def workspace(self, at: ActivationSizes) -> int:
        """Bytes of a loss in passing: logits, or their gradients, of a chunk of tokens; beside these what
        products take, or in 16 bits a copy in fp32 for torch's functions.
        """
        count = chunk_rows(at.tokens, len(self.table), at.gpu)
        logits = count * len(self.table)
        copied = 4 if at.itemsize < 4 and not self.groups.functions.compiled else 0
        return logits * at.itemsize + max(logits * copied, self.product.passing(count, at))

    def losses(
        self, hidden: Tensor, rows: slice, of_chunk: ChunkLoss, learning: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Losses of tokens [n] and, when learning, the gradient of their products with the table [n, V/t]."""
        return of_chunk(
            SplitLogits(self.product.logits(hidden[rows]), self.rows, self.multiplier), rows, learning
        )


class _HeadLossAutograd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: VocabularyHead, of_chunk: ChunkLoss, learning: bool, _: Tensor
    ) -> Tensor:
        table = head.table
        whole = head.groups.gathered(hidden)
        rows = whole.reshape(-1, whole.shape[-1])
        gradient = torch.empty_like(rows) if learning else None
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        count = chunk_rows(rows.shape[0], table.shape[0], not rows.is_cpu)
        for start in range(0, rows.shape[0], count):
            part = slice(start, start + count)
            losses, of_logits = head.losses(rows, part, of_chunk, learning)
            loss += losses.sum()
            if gradient is not None and of_logits is not None:
                head.product.input_gradient(of_logits, gradient[part])
                if table.requires_grad:
                    head.product.add_weight_gradient(of_logits, rows[part])
            del of_logits  # the next chunk's logits can lie where this one's did
        ctx.head = head
        if gradient is not None:
            ctx.save_for_backward(gradient.view_as(whole))
        return loss

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        head: VocabularyHead = ctx.head
        (gradient,) = ctx.saved_tensors
        gradient = head.groups.sum(gradient)
        if head.table.requires_grad:
            head.table.added()
        return gradient, None, None, None, None
