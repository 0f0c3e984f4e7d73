"""Causal self-attention with grouped queries, split by heads over the tensor axis.

One column-parallel linear layer computes queries, keys and values of this rank's heads. They may be
clamped, normalized and rotated, as the shape says, and go to the core: softmax attention by the kernel of
this machine, or over the ranks of the context axis. A row-parallel linear layer computes the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from hpctrain.data.documents import Documents
from hpctrain.model.inputs import Cache
from hpctrain.model.query_key_norm import QueryKeyNorm
from hpctrain.model.query_key_value_clip import QueryKeyValueClip
from hpctrain.model.rotary import Rotary
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.attention.core import AttentionCore, attention_core
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import AttentionSize, ElementwiseSize
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.tensor import ColumnLinear, Partition, RowLinear, rows_shard


class Attention(nn.Module):
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
        super().__init__()
        size = shape.head_size
        self.layer_context, self.head_size, self.block = layer_context, size, block
        score_factor, given_scale = shape.width_scaling.of_scores, shape.attention_scale
        self.scale = (
            None if score_factor == 1 and given_scale is None else score_factor * (given_scale or size**-0.5)
        )
        window = shape.window(block) if shape.window(block) < shape.sequence else 0
        self.rule = AttentionRule(self.scale, window, shape.attention_cap)
        self.compute_core = attention_core(layer_context, self.rule, shape.attention_sinks)
        self.core = AttentionSize(shape.heads, shape.key_value_heads, size, shape.sequence, window)
        self.rotated, self.local = shape.rotates(block), shape.is_local(block)
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

    @property
    def exchanges(self) -> bool:
        """True if the core's output is sent back by other ranks, into another tensor."""
        return self.layer_context.context.size > 1 and self.layer_context.context_form == "all_to_all"

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
        tables: tuple[Tensor, ...] = ()
        if rotary is not None and self.rotated:
            tables = rotary.local_tables if self.local else rotary.tables
        core: Callable[..., Tensor] = partial(self.compute_core, documents=documents)
        if self.sinks is not None:
            parts, core = [*parts, self.sinks], partial(_attend_with_sinks, core)
        attended = self.layer_context.saved_policy.attend(core, parts, tables)
        output: Tensor = self.output(attended.flatten(2))
        return output


def _attend_with_sinks(
    core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *tables: Tensor
) -> Tensor:
    """Return the result of a core with sinks among its operands, which the policy of activations keeps."""
    return core(query, key, value, *tables, sinks=sinks)
