"""Causal self-attention with grouped queries, split by heads over the tensor axis.

One column-parallel linear layer computes queries, keys and values of this rank's heads. They may be
normalized, are rotated in the family `llama`, and go to the core: softmax attention by the kernel of this
machine, or over the ranks of the context axis. A row-parallel linear layer computes the output.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from hpctrain.data.documents import Documents
from hpctrain.model.inputs import Cache
from hpctrain.model.query_key_norm import QueryKeyNorm
from hpctrain.model.rotary import Rotary
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage, total
from hpctrain.parallel.attention.core import attention_core
from hpctrain.parallel.kernels.function_library import workspace_floats
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import AttentionSize, ElementwiseSize
from hpctrain.parallel.tensor import ColumnLinear, RowLinear, RowPartition


class Attention(nn.Module):
    """Attention of one block, [s or s/t, b, h] -> the same shape.

    Args:
        name: Name of the layer, with which names of parameters begin.
        shape: Sizes of the model.
        groups: Process groups and settings of this rank's layers.
        block: Number of the block, by which a cache stores keys and values.
    """

    def __init__(self, name: str, shape: ModelShape, groups: LayerContext, block: int) -> None:
        super().__init__()
        size = shape.head_size
        self.groups, self.head_size, self.block = groups, size, block
        changed = shape.parametrization.of_scores
        self.scale = None if changed == 1 else changed * size**-0.5
        self.compute_core = attention_core(groups, self.scale)
        self.core = AttentionSize(shape.heads, shape.key_value_heads, size, shape.sequence)
        self.rotated = shape.traits.positions == "rotary"
        queries = RowPartition.split(shape.heads * size, groups.tensor, size)
        keys = RowPartition.split(shape.key_value_heads * size, groups.tensor, size)
        self.inner = ColumnLinear(
            shape.hidden,
            [
                (f"{name}.query", replace(queries, unit=size)),
                (f"{name}.key", replace(keys, unit=size)),
                (f"{name}.value", keys),
            ],
            shape.attention_bias != "none",
            groups,
            adapters=shape.adapters,
        )
        normed = shape.query_key_norm != "none"
        self.norm = QueryKeyNorm(name, shape, groups, queries, keys) if normed else None
        sizes = shape.heads * size, shape.hidden
        shared = groups.saved_policy.keeps_core and not self.exchanges
        biased = shape.attention_bias == "all"
        self.output = RowLinear(f"{name}.output", *sizes, biased, groups, shared, shape.adapters)

    @property
    def _compiled(self) -> bool:
        """True if rotation and core are one compiled function."""
        return self.groups.functions.compiled and self.groups.context.size == 1

    @property
    def _saves_rotated_copies(self) -> bool:
        """True if the core saves other queries and keys than the projected ones."""
        return self.rotated and (self.norm is not None or not self._compiled)

    def workspace(self, at: ActivationSizes) -> int:
        """Return the temporary bytes of the backward pass of a compiled core; 0 for other cores.

        They are the gradients of the output and of the projections, and the kernel's workspace.
        """
        if not self._compiled:
            return 0
        queries, keys, _ = self.inner.split_sizes
        return at.features(2 * queries + 2 * keys).bytes + 4 * workspace_floats(
            at.tokens // at.micro_size, self.head_size
        )

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations on queries and keys before the core."""
        features = (self.core.heads + self.core.key_value_heads) * self.head_size
        normed = [ElementwiseSize("norm", features, True)] if self.norm is not None else []
        return [*normed, *([ElementwiseSize("rotation", features, True)] if self.rotated else [])]

    @property
    def exchanges(self) -> bool:
        """True if the core's output is sent back by other ranks, into another tensor."""
        return self.groups.context.size > 1 and self.groups.context_form == "all_to_all"

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
        parts = [
            part.unflatten(-1, (-1, self.head_size)) for part in inner.split(self.inner.split_sizes, dim=-1)
        ]
        if self.norm is not None:
            parts[:2] = self.norm(*parts[:2])
        if cache is not None:
            query, key, value = parts
            cached: Tensor = self.output(cache.attend(self.block, query, key, value, self.scale).flatten(2))
            return cached
        tables = rotary.tables if rotary is not None else ()
        core = partial(self.compute_core, documents=documents)
        attended = self.groups.saved_policy.attend(core, parts, tables)
        output: Tensor = self.output(attended.flatten(2))
        return output

    def saved(self, at: ActivationSizes) -> list[SavedStorage]:
        """Return what autograd saves: what the core saves, and its output if the core does not save it."""
        alone = at.selective or self.exchanges
        return [
            *self._core(at),
            *(self.output.saved_input(at) if alone else []),
            *self.output.adapter_saved(at),
        ]

    def _core(self, at: ActivationSizes) -> list[SavedStorage]:
        """Return what the core saves: its inputs, and unless it is recomputed its output and log-sum-exp."""
        queries, keys, _ = self.inner.split_sizes
        projected, output, shared = (at.features(count) for count in (queries + 2 * keys, queries, keys))
        statistics = [] if self.norm is None else self.norm.saved(at)
        if at.selective:
            normed = [] if self.norm is None else [output, shared]
            return [projected, *statistics, *normed]
        log_sum = at.features(queries // self.head_size, 4)
        log_sum = SavedStorage(log_sum.bytes, 4, features=False)
        if self.exchanges:
            # The queries, keys, values and output after the exchange.
            exchanged = at.features(max(keys, self.groups.context.size * self.head_size))
            normed = [] if self.norm is None else [projected, *statistics]
            return [*normed, output, exchanged, exchanged, output, log_sum]
        rotated = [output, shared] if self._saves_rotated_copies else []
        return [projected, *statistics, *rotated, output, log_sum]

    def made_again(self, at: ActivationSizes) -> int:
        """Return the bytes that a recomputed core saves beside its inputs and output."""
        queries, keys, _ = self.inner.split_sizes
        known = total(self._core(replace(at, selective=True)))
        known += 0 if self.exchanges else at.features(queries).bytes
        if self.norm is not None and not self._compiled:
            # The first ones are normalized queries and keys, the others rotated ones.
            known -= at.features(queries + keys).bytes
        return total(self._core(replace(at, selective=False))) - known
