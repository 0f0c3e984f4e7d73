"""Norms of queries and keys before their rotation.

RMSNorm is over each head (Qwen3) or over all heads (OLMoE), LayerNorm over each head (StableLM, Cohere).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.model.shape import ModelShape
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Initial, Parameter, Partition, Shard, piece_and_position, split_shard


class QueryKeyNorm(nn.Module):
    """RMSNorm or LayerNorm of queries [s, b, heads, d] and keys [s, b, key/value heads, d] of this rank.

    RMSNorm over each head: all heads share one weight [d], and a rank sees its own heads only, so that the
    weight's gradient is a partial sum over the tensor axis. Over all heads: the weight is split like the
    heads, and the mean of squares is over the heads of all ranks. Two numbers per token are summed over the
    tensor axis in both passes. LayerNorm over each head: the weight is split like the heads.

    Attributes:
        joint: True if means are over all heads.
        centered: True for LayerNorm.
        rows: Split of queries and of keys over tensor ranks.
        key_holders: Number of tensor ranks that hold the same key/value heads as this one.
        key_position: Position of this rank among them, from 0.
    """

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        layer_context: LayerContext,
        queries: Partition,
        keys: Partition,
    ) -> None:
        super().__init__()
        self.epsilon, self.head_size = shape.norm_epsilon, shape.head_size
        self.offset = 1 if shape.norm_weight == "one_plus" else 0
        self.functions = layer_context.functions
        self.tensor, self.joint = layer_context.tensor, shape.query_key_norm == "all"
        self.centered = shape.query_key_norm == "layer_per_head"
        self.rows = (queries, keys)
        piece, self.key_position = piece_and_position(keys.holder_counts, self.tensor.rank)
        self.key_holders = keys.holder_counts[piece] if keys.holder_counts else 1
        ones: Initial = "zeros" if self.offset else "ones"
        self.query_weight, self.key_weight = (
            Parameter(self._shard(f"{name}.{kind}_norm.weight", rows), False, ones)
            for kind, rows in (("query", queries), ("key", keys))
        )

    def _shard(self, name: str, rows: Partition) -> Shard:
        if self.joint or self.centered:
            return split_shard(name, rows)
        return Shard.replicated(name, (self.head_size,), frozenset({"tensor"}))

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized queries and keys."""
        if not self.joint and not self.centered:
            norm, options = self.functions.head_norm, (self.epsilon, self.offset)
            return norm(query, self.query_weight, *options), norm(key, self.key_weight, *options)
        result: tuple[Tensor, Tensor] = _QueryKeyNormAutograd.apply(
            query, key, self.query_weight, self.key_weight, self
        )
        return result

    def means(self, products: list[Tensor], shared: bool) -> list[Tensor]:
        """Return means of [s, b, heads, d] over each head, or over all heads of all ranks.

        Args:
            products: Tensors of queries and of keys.
            shared: True if the ranks that hold the same keys have equal values, which count once; False if
                each of these ranks has one summand of the value.

        Returns:
            Means of each tensor, [s, b, heads or 1, 1].
        """
        if not self.joint:
            return [product.mean(-1, keepdim=True) for product in products]
        sums = torch.cat([product.sum((-2, -1), keepdim=True) for product in products], -1)
        if self.tensor.size > 1:
            if shared and self.key_position:
                sums[..., 1] = 0
            self.tensor.all_reduce(sums)
        summed_parts = sums.split(1, -1)
        return [part / rows.size for part, rows in zip(summed_parts, self.rows, strict=True)]


class _QueryKeyNormAutograd(torch.autograd.Function):
    """RMSNorm over all heads of all tensor ranks, or LayerNorm over each head.

    The former is collective in both passes, the latter is local. The result is the weight times the
    normalized x: x / sqrt(mean x^2 + epsilon), in LayerNorm with x - mean x for x. The backward pass
    recomputes the normalized values instead of saving them.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, norm: QueryKeyNorm
    ) -> tuple[Tensor, Tensor]:
        both, weights = [query.float(), key.float()], (query_weight, key_weight)
        centers = [x.mean(-1, keepdim=True) for x in both] if norm.centered else []
        if centers:
            both = [x - center for x, center in zip(both, centers, strict=True)]
        means = norm.means([x.square() for x in both], shared=True)
        inverses = [(mean + norm.epsilon).rsqrt() for mean in means]
        ctx.norm = norm
        ctx.save_for_backward(query, key, *weights, *inverses, *centers)
        first, second = (
            (x * inverse * _weight_factor(weight, x, norm.offset)).to(query.dtype)
            for x, inverse, weight in zip(both, inverses, weights, strict=True)
        )
        return first, second

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        norm: QueryKeyNorm = ctx.norm
        query, key, *others = ctx.saved_tensors
        weights, inverses, centers = others[:2], others[2:4], others[4:]
        both = [query.float(), key.float()]
        if centers:
            both = [x - center for x, center in zip(both, centers, strict=True)]
        normed = [x * inverse for x, inverse in zip(both, inverses, strict=True)]
        weight_gradients: list[Tensor | None] = [
            (gradient * x).sum((0, 1)).flatten().to(weight.dtype) if needed else None
            for gradient, x, weight, needed in zip(
                gradients, normed, weights, ctx.needs_input_grad[2:4], strict=True
            )
        ]
        normed_gradients = [
            gradient * _weight_factor(weight, gradient, norm.offset)
            for gradient, weight in zip(gradients, weights, strict=True)
        ]
        means = norm.means([g * x for g, x in zip(normed_gradients, normed, strict=True)], shared=False)
        x_gradients = []
        for g, x, mean, inverse, holders in zip(
            normed_gradients, normed, means, inverses, (1, norm.key_holders), strict=True
        ):
            # Gradients of ranks with the same keys are summed later, so each of them computes its share.
            share = mean / holders if norm.joint else mean
            x_gradient = g - x * share
            if norm.centered:
                x_gradient -= g.mean(-1, keepdim=True)
            x_gradients.append((inverse * x_gradient).to(query.dtype))
        return (*x_gradients, *weight_gradients, None)


def _weight_factor(weight: Tensor, x: Tensor, offset: int) -> Tensor:
    """Return a weight [heads * d] plus `offset` as a factor of x [s, b, heads, d], in fp32."""
    factor = weight.float() + offset if offset else weight.float()
    return factor.view(-1, x.shape[-1])
