"""Causal self-attention with grouped queries, split by heads over the tensor axis.

One column-parallel linear layer computes queries, keys and values of this rank's heads. They may be
clamped, normalized and rotated, as the shape says, and go to the core: softmax attention by the kernel of
this machine, or over the ranks of the context axis. A row-parallel linear layer computes the output.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from typing_extensions import override

from hpctrain.data.documents import Documents
from hpctrain.model.block_attention import BlockAttention
from hpctrain.model.inputs import Cache
from hpctrain.model.query_key_norm import QueryKeyNorm
from hpctrain.model.query_key_value_clip import QueryKeyValueClip
from hpctrain.model.rotary import Rotary
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.tensor import ColumnLinear, Partition, RowLinear, rows_shard


class Attention(BlockAttention):
    """Attention of one block, [s or s/t, b, h] -> the same shape.

    Args:
        name: Name of the layer, with which names of parameters begin.
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.
        block: Number of the block, by which a cache stores keys and values.
        shared_input: True if the feed-forward part saves the same input.
    """

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        layer_context: LayerContext,
        block: int,
        shared_input: bool = False,
    ) -> None:
        super().__init__(shape, layer_context, block)
        size = shape.head_size
        queries = Partition.split(shape.heads * size, layer_context.tensor, size)
        keys = Partition.split(shape.key_value_heads * size, layer_context.tensor, size)
        self.inner = ColumnLinear(
            shape.hidden,
            [
                (f"{name}.query", replace(queries, unit=size)),
                (f"{name}.key", replace(keys, unit=size)),
                (f"{name}.value", keys),
            ],
            shape.attention_bias != "none",
            layer_context,
            shared_input,
            adapters=shape.adapters,
        )
        clip = shape.query_key_value_clip
        self.clip = QueryKeyValueClip(clip, layer_context.saved_policy.rounds) if clip else None
        self.sinks: Parameter | None = None
        if shape.attention_sinks:
            heads = Partition.split(shape.heads, layer_context.tensor)
            self.sinks = Parameter(rows_shard(f"{name}.sinks", heads, ()), False, "zeros")
        normed = shape.query_key_norm != "none"
        self.norm = QueryKeyNorm(name, shape, layer_context, queries, keys) if normed else None
        sizes = shape.heads * size, shape.hidden
        shared = layer_context.saved_policy.keeps_core and not self.exchanges
        biased = shape.attention_bias == "all"
        self.output = RowLinear(f"{name}.output", *sizes, biased, layer_context, shared, shape.adapters)

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations on queries and keys before the core."""
        features = (self.core.heads + self.core.key_value_heads) * self.head_size
        normed = [ElementwiseSize("norm", features, True)] if self.norm is not None else []
        values = self.core.key_value_heads * self.head_size
        clipped = [ElementwiseSize("activation", features + values, True)] if self.clip is not None else []
        rotated = [ElementwiseSize("rotation", features, True)] if self.rotated else []
        return [*clipped, *normed, *rotated]

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the attention output for x. Collective over the context and tensor axes.

        Each position attends to all earlier ones of its sequence.

        Args:
            x: Normalized hidden states.
            rotary: Tables of the positions; None in families without rotation.
            documents: Documents of packed sequences, to which attention is limited; None without packing.
            cache: Keys and values of texts that are continued, which replace the sequence; None in training.
        """
        inner = self.inner(x)
        if self.clip is not None:
            inner = self.clip(inner)
        parts = [
            part.unflatten(-1, (-1, self.head_size)) for part in inner.split(self.inner.split_sizes, dim=-1)
        ]
        if self.norm is not None:
            parts[:2] = self.norm(*parts[:2])
        if cache is not None:
            query, key, value = parts
            cached = cache.attend(self.block, query, key, value, self.rule, self.sinks)
            continued: Tensor = self.output(cached.flatten(2))
            return continued
        operands = parts if self.sinks is None else [*parts, self.sinks]
        output: Tensor = self.output(self.attend(operands, rotary, documents).flatten(2))
        return output

    @override
    def _attend(self, *operands_and_tables: Tensor, documents: Documents | None) -> Tensor:
        query, key, value, *others = operands_and_tables
        sinks = None if self.sinks is None else others.pop(0)
        return self.compute_core(AttentionInputs(query, key, value, sinks, tuple(others), documents))
