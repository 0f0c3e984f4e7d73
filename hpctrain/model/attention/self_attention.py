"""Causal self-attention with grouped queries, split by heads over the tensor axis.

One column-parallel linear layer computes queries, keys and values of this rank's heads. They may be
clamped, normalized and rotated, as the shape says, and go to the core: softmax attention by the kernel of
this machine, or over the ranks of the context axis. A row-parallel linear layer computes the output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from typing_extensions import override

from hpctrain.data.documents import Documents
from hpctrain.model.attention.query_key_norm import QueryKeyNorm
from hpctrain.model.attention.query_key_value_clip import QueryKeyValueClip
from hpctrain.model.attention.rotary import Rotary
from hpctrain.model.inputs import Cache
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.attention.core import attention_core
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import AttentionSize, ElementwiseSize
from hpctrain.parallel.shards import Parameter, Partition, split_shard
from hpctrain.parallel.tensor import ColumnLinear, LinearSpec, RowLinear


class BlockAttention(nn.Module, ABC):
    """Attention of one block, with the rule and the sizes of the core that a shape gives the block.

    Args:
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.
        block: Number of the block, by which a cache stores keys and values.
        value_size: Features of a head's values; None for those of queries and keys.

    Attributes:
        rule: Scale, window and soft cap of the block.
        compute_core: Softmax attention of this rank's heads, over the ranks of the context axis.
        core: Sizes of the core.
        uses_rotary: True if queries and keys are rotated.
        uses_local_tables: True if they are rotated by the angles of layers with windows.
        output: Last layer, which a subclass builds.
    """

    output: RowLinear

    def __init__(
        self, shape: ModelShape, layer_context: LayerContext, block: int, value_size: int | None = None
    ) -> None:
        super().__init__()
        self.layer_context, self.head_size, self.block = layer_context, shape.head_size, block
        window = shape.window(block) if shape.window(block) < shape.sequence else 0
        self.rule = AttentionRule(shape.score_scale, window, shape.attention_cap)
        self.compute_core = attention_core(layer_context, self.rule)
        heads = shape.heads, shape.key_value_heads
        self.core = AttentionSize(*heads, shape.head_size, shape.sequence, window, value_size)
        self.uses_rotary, self.uses_local_tables = shape.rotates(block), shape.is_local(block)

    @property
    def sends_heads(self) -> bool:
        """True if the core's output is sent back by other ranks, into another tensor."""
        return self.layer_context.context.size > 1 and self.layer_context.context_form == "all_to_all"

    @property
    def has_compiled_core(self) -> bool:
        """True if one compiled function rotates and attends."""
        return self.layer_context.functions.compiled and self.layer_context.context.size == 1

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the attention output for x. Collective over the context and tensor axes.

        Each position attends to all earlier ones of its sequence. The policy of activations decides whether
        the backward pass gets what the core saves, or only its operands, from which it computes the core
        again.

        Args:
            x: Normalized hidden states.
            rotary: Tables of the positions; None in families without rotation.
            documents: Documents of packed sequences, to which attention is limited; None without packing.
            cache: Keys and values of texts that are continued, which replace the sequence; None in training.
        """
        if cache is not None:
            attended = self.attend_to_cache(x, cache)
        else:
            tables: tuple[Tensor, ...] = ()
            if rotary is not None and self.uses_rotary:
                tables = rotary.local_tables if self.uses_local_tables else rotary.tables
            compute = partial(self.attend, documents=documents)
            attended = self.layer_context.saved_policy.attend(compute, self.operands(x), tables)
        output: Tensor = self.output(attended.flatten(2))
        return output

    @abstractmethod
    def operands(self, x: Tensor) -> Sequence[Tensor]:
        """Return the operands of `attend`, which are computed from normalized hidden states."""

    @abstractmethod
    def attend(self, *operands_and_tables: Tensor, documents: Documents | None) -> Tensor:
        """Return the output of the core [s, b, heads, v]. Collective over the context axis.

        Args:
            operands_and_tables: Operands of the layer, then the tables of a Rotary if it rotates.
            documents: As in `forward`.
        """

    @abstractmethod
    def attend_to_cache(self, x: Tensor, cache: Cache) -> Tensor:
        """Return the attention [n, 1, heads, v] of rows x [n, 1, h] to the texts in a cache."""


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
        heads, key_value_heads = Partition.of_heads(shape.heads, shape.key_value_heads, layer_context.tensor)
        queries, keys = heads.times(size), key_value_heads.times(size)
        outputs = [
            (f"{name}.query", replace(queries, unit=size)),
            (f"{name}.key", replace(keys, unit=size)),
            (f"{name}.value", keys),
        ]
        biased = shape.attention_bias != "none"
        spec = LinearSpec(shape.hidden, outputs, biased, shared_input, shape.adapters, by_heads=True)
        self.inner = ColumnLinear(spec, layer_context)
        clip = shape.query_key_value_clip
        self.clip = QueryKeyValueClip(clip, layer_context.saved_policy.rounds_activations) if clip else None
        self.sinks: Parameter | None = None
        if shape.attention_sinks:
            self.sinks = Parameter(split_shard(f"{name}.sinks", heads), False, "zeros")
        normed = shape.query_key_norm != "none"
        self.norm = QueryKeyNorm(name, shape, layer_context, queries, keys) if normed else None
        output = (f"{name}.output", shape.hidden)
        shared = layer_context.saved_policy.keeps_core and not self.sends_heads
        biased = shape.attention_bias == "all"
        spec = LinearSpec(queries, [output], biased, shared, shape.adapters, by_heads=True)
        self.output = RowLinear(spec, layer_context)

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations on queries and keys before the core."""
        features = (self.core.heads + self.core.key_value_heads) * self.head_size
        normed = [ElementwiseSize("norm", features, True)] if self.norm is not None else []
        values = self.core.key_value_heads * self.head_size
        clipped = [ElementwiseSize("activation", features + values, True)] if self.clip is not None else []
        rotated = [ElementwiseSize("rotation", features, True)] if self.uses_rotary else []
        return [*clipped, *normed, *rotated]

    @override
    def operands(self, x: Tensor) -> Sequence[Tensor]:
        inner = self.inner(x)
        if self.clip is not None:
            inner = self.clip(inner)
        parts = [
            part.unflatten(-1, (-1, self.head_size)) for part in inner.split(self.inner.split_sizes, dim=-1)
        ]
        if self.norm is not None:
            parts[:2] = self.norm(*parts[:2])
        return parts if self.sinks is None else [*parts, self.sinks]

    @override
    def attend(self, *operands_and_tables: Tensor, documents: Documents | None) -> Tensor:
        query, key, value, *others = operands_and_tables
        sinks = None if self.sinks is None else others.pop(0)
        return self.compute_core(AttentionInputs(query, key, value, sinks, tuple(others), documents))

    @override
    def attend_to_cache(self, x: Tensor, cache: Cache) -> Tensor:
        query, key, value, *_ = self.operands(x)
        return cache.attend(self.block, AttentionInputs(query, key, value, self.sinks), self.rule)
