"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434), split by heads over the tensor axis.

A replicated linear layer compresses hidden states to a latent of queries, a latent of keys and values, and
rotated features of keys, which all heads share. Both latents are normalized. Column-parallel linear layers
compute from them the queries, and the keys and values of this rank's heads:

    query [d] = rotated features [r], unrotated features [d - r]
    key   [d] = shared rotated features [r], unrotated features [d - r] of this head
    value [v]

The features of a head are in the order of `Rotary`: rotated features come first in both halves. The attention
core requires heads of one size, so values are padded with zeros to d. Queries can also be computed directly
from hidden states, without a latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from hpctrain.data.documents import Documents
from hpctrain.model.attention.self_attention import BlockAttention
from hpctrain.model.inputs import Cache
from hpctrain.model.norm import Norm
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize
from hpctrain.parallel.replicated_linear import ReplicatedLinear, share_over_heads
from hpctrain.parallel.shards import Partition
from hpctrain.parallel.tensor import ColumnLinear, LinearSpec, RowLinear

_EPSILON = 1e-6
"""Epsilon of the norms of latents, which is the same in all of DeepSeek's models."""


class LatentAttention(BlockAttention):
    """Latent attention of one block, [s or s/t, b, h] -> the same shape.

    Args:
        name: Name of the layer, with which names of parameters begin.
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.
        block: Number of the block, by which a cache stores keys and values.
        shared_input: True if the feed-forward part saves the same input.

    Attributes:
        rotary_size: Features of a head that are rotated.
        value_size: Features of a head's values.
        heads: Number of heads that this rank computes, with padding.
        compress: Layer that computes the latents and the shared features of keys.
        query: Layer that computes the queries.
        expand: Layer that computes the unrotated features of keys, and the values.
        query_norm: Norm of the latent of queries; None if there is none.
    """

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        layer_context: LayerContext,
        block: int,
        shared_input: bool = False,
    ) -> None:
        latent, size = shape.latent, shape.head_size
        assert latent is not None
        super().__init__(shape, layer_context, block, latent.value_size)
        self.rotary_size, self.value_size = latent.rotary_size, latent.value_size
        tensor = layer_context.tensor
        heads, _ = Partition.of_heads(shape.heads, shape.heads, tensor)  # no head shares keys and values
        self.heads = heads.local

        def rows(head_rows: int) -> Partition:
            return replace(heads.times(head_rows), unit=head_rows)

        directly = latent.query_rank is None
        compressed = [
            (f"{name}.latent_down", latent.key_value_rank),
            (f"{name}.shared_key", latent.rotary_size),
        ]
        inputs, queries, self.query_norm = shape.hidden, f"{name}.query", None
        if latent.query_rank is not None:
            compressed = [(f"{name}.query_down", latent.query_rank), *compressed]
            inputs, queries = latent.query_rank, f"{name}.query_up"
            self.query_norm = _norm(f"{name}.query_down_norm", inputs, shape, layer_context)
        spec = LinearSpec(shape.hidden, compressed, shared_input=shared_input or directly)
        self.compress = ReplicatedLinear(spec, layer_context)
        spec = LinearSpec(inputs, [(queries, rows(size))], shared_input=directly, by_heads=True)
        self.query = ColumnLinear(spec, layer_context)
        self.latent_norm = _norm(f"{name}.latent_norm", latent.key_value_rank, shape, layer_context)
        expanded = [
            (f"{name}.key_up", rows(size - latent.rotary_size)),
            (f"{name}.value_up", replace(rows(latent.value_size), unit=1)),
        ]
        self.expand = ColumnLinear(LinearSpec(latent.key_value_rank, expanded, by_heads=True), layer_context)
        shares = not self.pads and layer_context.saved_policy.keeps_core and not self.sends_heads
        output = (f"{name}.output", shape.hidden)
        spec = LinearSpec(heads.times(latent.value_size), [output], shared_input=shares, by_heads=True)
        self.output = RowLinear(spec, layer_context)

    @property
    def pads(self) -> bool:
        """True if values are smaller than queries and keys."""
        return self.value_size < self.head_size

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations before and after the core."""
        features = self.core.heads * self.head_size
        normed = sum(norm.size[0] for norm in (self.query_norm, self.latent_norm) if norm is not None)
        rotated = [ElementwiseSize("rotation", 2 * features, True)] if self.uses_rotary else []
        # Keys and values are copied to heads of one size, and the output is copied back to heads of size v.
        return [ElementwiseSize("norm", normed), *rotated, ElementwiseSize("add", 3 * features, True)]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [s, b, heads, d], normalized latents [s, b, rank] and shared features [s, b, r]."""
        # Contiguous copies, so that autograd does not keep the joint tensor of all parts.
        *query_latent, latent, shared_key = (
            part.contiguous() for part in self.compress(x).split(self.compress.split_sizes, dim=-1)
        )
        query = self.query(x if self.query_norm is None else self.query_norm(*query_latent))
        return query.unflatten(-1, (self.heads, self.head_size)), self.latent_norm(latent), shared_key

    @override
    def operands(self, x: Tensor) -> Sequence[Tensor]:
        query, latent, shared_key = self._project(x)
        return query, self.expand(latent), share_over_heads(shared_key, self.layer_context)

    @override
    def attend(self, *operands_and_tables: Tensor, documents: Documents | None) -> Tensor:
        query, expanded, shared_key, *tables = operands_and_tables
        key, value = self._keys_and_values(expanded, shared_key)
        inputs = AttentionInputs(query, key, value, tables=tuple(tables), documents=documents)
        attended = self.compute_core(inputs)
        return attended[..., : self.value_size] if self.pads else attended

    @override
    def attend_to_cache(self, x: Tensor, cache: Cache) -> Tensor:
        # Weight absorption (DeepSeek-V2, sec. 2.1.2): key_up is multiplied into the queries and value_up into
        # the outputs, so the cache stores one latent per token. Its keys are latents with shared features,
        # and its values are latents, which all heads share.
        query, latent, shared_key = self._project(x)
        key_up, value_up = (weight.detach().unflatten(0, (self.heads, -1)) for weight in self.expand.weights)
        sizes = [self.rotary_size // 2, (self.head_size - self.rotary_size) // 2]
        rotated_1, unrotated_1, rotated_2, unrotated_2 = query.split(2 * sizes, dim=-1)
        latent_query = torch.einsum("nbhp,hpr->nbhr", torch.cat((unrotated_1, unrotated_2), dim=-1), key_up)
        query = _join_halves(torch.cat((rotated_1, rotated_2), dim=-1), latent_query)
        key = _join_halves(shared_key, latent)
        value = functional.pad(latent, (0, key.shape[-1] - latent.shape[-1]))
        inputs = AttentionInputs(query, key.unsqueeze(2), value.unsqueeze(2))
        attended = cache.attend(self.block, inputs, self.rule)
        return torch.einsum("nbhr,hvr->nbhv", attended[..., : latent.shape[-1]], value_up)

    def _keys_and_values(self, expanded: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [s, b, heads, d] from the features of each head and the shared ones."""
        key, value = (
            part.unflatten(-1, (self.heads, -1)) for part in expanded.split(self.expand.split_sizes, dim=-1)
        )
        shared = shared_key.unsqueeze(2).expand(-1, -1, self.heads, -1)
        key = _join_halves(shared, key)
        if self.pads:
            value = functional.pad(value, (0, self.head_size - self.value_size))
        return key, value


def _join_halves(rotated: Tensor, unrotated: Tensor) -> Tensor:
    """Return features in the order of `Rotary`: rotated features come first in both halves.

    An odd number of features has a zero at the end, so that halves have one size.
    """
    if unrotated.shape[-1] % 2:
        unrotated = functional.pad(unrotated, (0, 1))
    halves = zip(rotated.chunk(2, dim=-1), unrotated.chunk(2, dim=-1), strict=True)
    return torch.cat([part for half in halves for part in half], dim=-1)


def _norm(name: str, size: int, shape: ModelShape, layer_context: LayerContext) -> Norm:
    """Return an RMSNorm of `size` features."""
    norm_shape = replace(
        shape, hidden=size, norm="rms", norm_weight="plain", norm_bias=False, norm_epsilon=_EPSILON
    )
    return Norm(name, norm_shape, layer_context)
