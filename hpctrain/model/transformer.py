"""Decoder-only transformer of all families (`deck/families/`), made of parallel layers.

Sizes: s tokens of a sequence (of this rank's piece, if the context axis splits sequences), b sequences of a
micro-batch, h hidden features, t tensor ranks, V tokens of the vocabulary. Activations are sequence first.

1. `Embedding`: token ids [s, b] -> hidden states x [s, b, h], plus learned positions in some families.
2. Each `TransformerBlock`, with norms and residual connections, as a family places them:
       x = x + attention(attention_norm(x))
       x = x + feed_forward(feed_forward_norm(x))
   - `Norm`: LayerNorm or RMSNorm, [s, b, h] -> the same shape.
   - `Attention`: linear layer [s, b, h] -> queries, keys and values [s, b, heads/t, d] of this rank's heads,
     attention of each head, and linear layer [s, b, heads/t * d] -> [s, b, h], summed over tensor ranks.
     `LatentAttention` may take its place.
   - `FeedForward`: linear layer [s, b, h] -> [s, b, inner/t], activation, and linear layer back to
     [s, b, h], summed over tensor ranks. A `Mixture` of experts may take its place.
3. `Predictor`: final norm, any modules of multi-token prediction (`PredictionModule`), and the output layer
   [s, b, h] -> logits [s, b, V/t], which the loss computes in chunks of tokens.

Under sequence parallelism, x is [s/t, b, h] between split layers. They gather the sequence first, and each
rank gets its slice of the sum in the end. A pipeline gives a range of these layers to each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from hpctrain.model.attention.rotary import Rotary
from hpctrain.model.block import PassContext, TransformerBlock, TransformerLayer
from hpctrain.model.inputs import ModelInputs, field_ahead
from hpctrain.model.mixtures.mixture import MixtureBlock
from hpctrain.model.norm import Norm
from hpctrain.model.part import (
    Computed,
    Layer,
    LayerKind,
    LayerRange,
    Unit,
    parameters_by_module,
    parameters_in,
)
from hpctrain.model.prediction_module import PredictionModule, prediction_modules
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.backward.saved_policy import LayerPass
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, MatrixSize
from hpctrain.parallel.random import dropout
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.scalar_head import ScalarHead
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, vocabulary_shard


class PositionEmbedding(nn.Module):
    """Learned vector per position that is added to [s or s/t, b, h]."""

    def __init__(self, name: str, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__()
        size, partial_axes = (shape.sequence, shape.hidden), layer_context.sequence_partial
        self.table = Parameter(Shard.replicated(f"{name}.weight", size, partial_axes), initial="table")

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x plus the vectors of `positions`: [s or s/t], or [s or s/t, b] with packed documents."""
        added = functional.embedding(positions, self.table)
        return x + (added.unsqueeze(1) if positions.dim() == 1 else added)


class Embedding(TransformerLayer):
    """Embedding of tokens [s, b] -> [s or s/t, b, h], with learned positions if the family has them."""

    kind = LayerKind("embedding")

    def __init__(self, shape: ModelShape, layer_context: LayerContext, table: Parameter) -> None:
        super().__init__()
        self.hidden, self.probability, self.packed = shape.hidden, shape.dropout, shape.packed
        self.tokens = VocabularyEmbedding(table, layer_context)
        self.multiplier = shape.embedding_multiplier
        learned = shape.positions == "learned"
        self.positions = PositionEmbedding("embedding.positions", shape, layer_context) if learned else None

    @property
    def table(self) -> Parameter:
        """Parameter of this rank's token vectors, [V/t, h]."""
        return self.tokens.table

    def forward(self, tokens: Tensor, context: PassContext) -> Tensor:
        """Return the first hidden states of token ids."""
        x: Tensor = self.tokens(tokens)
        if self.multiplier != 1:
            x = x * self.multiplier
        if self.positions is not None:
            documents = context.inputs.documents
            x = self.positions(x, context.positions if documents is None else documents.at(context.positions))
        if context.inputs.dropout is not None:
            x = dropout(x, context.inputs.dropout, 0, context.positions, self.probability)
        return x

    def run(self, x: Tensor, context: PassContext, residency: ParameterResidency) -> Tensor:
        """Return the first hidden states. The table need not be gathered in backward."""
        with residency.in_memory(self.table):
            result: Tensor = self(x, context)
        return result

    @override
    def backward_order(self) -> Iterator[tuple[Parameter | None, list[Parameter]]]:
        yield None, self.all_parameters[::-1]

    @property
    @override
    def elementwise(self) -> list[ElementwiseSize]:
        added = [ElementwiseSize("add", self.hidden)] if self.positions is not None else []
        return [ElementwiseSize("lookup", self.hidden), *added]


class Predictor(TransformerLayer):
    """Final norm, modules of multi-token prediction if there are any, and output layer.

    Only training computes the modules. The results of all depths are then concatenated along the batch
    dimension.

    Args:
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.
        table: Matrix of the output layer, which has one row per token; None for a scalar output.
        lookup: Lookup in the table of the embedding, for modules of multi-token prediction.
        owned: Tables that belong to this layer and not to an embedding on this rank.

    Attributes:
        prediction_modules: Modules of multi-token prediction, from depth 1 on.
    """

    kind = LayerKind("head")

    def __init__(
        self,
        shape: ModelShape,
        layer_context: LayerContext,
        table: Parameter | None,
        lookup: VocabularyEmbedding | None = None,
        owned: Sequence[Parameter] = (),
    ) -> None:
        super().__init__()
        self.norm = Norm("final_norm", shape, layer_context)
        # In a tuple, so that the table is registered once, by its owner.
        self.lookup, self.multiplier = (lookup,), shape.embedding_multiplier
        modules = [] if lookup is None else prediction_modules(shape, layer_context)
        self.prediction_modules = cast("Sequence[PredictionModule]", nn.ModuleList(modules))
        if modules:
            self.auxiliary_loss_names = modules[0].auxiliary_loss_names
            if (core := modules[0].core) is not None:
                heads = len(modules) * core.heads, len(modules) * core.key_value_heads
                self.core = core._replace(heads=heads[0], key_value_heads=heads[1])
        multiplier, cap = shape.width_scaling.of_logits * shape.logit_multiplier, shape.logit_cap
        self.head: VocabularyHead | ScalarHead
        if table is None:
            self.head = ScalarHead(shape.hidden, layer_context, multiplier)
        else:
            self.head = VocabularyHead(table, layer_context, multiplier, cap)
        self.owned = nn.ParameterList(owned)

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        """Return the normalized last hidden states, which are the input of the output layer.

        With d modules of multi-token prediction the result is [s or s/t, (1 + d) b, h] in training.
        """
        result: Tensor = self.norm(x)
        if self.prediction_modules and torch.is_grad_enabled():
            return self._predict_further(result, context)
        return result

    def _predict_further(self, x: Tensor, context: PassContext) -> Tensor:
        """Return the hidden states with those of all modules of multi-token prediction beside them."""
        (lookup,), fields, residency = self.lookup, context.inputs.fields, context.residency
        assert lookup is not None
        depths = range(1, len(self.prediction_modules) + 1)
        tokens = torch.cat([fields[field_ahead("tokens", depth)].t() for depth in depths], 1)
        with residency.in_memory(lookup.table):
            embedded: Tensor = lookup(tokens)
        if self.multiplier != 1:
            embedded = embedded * self.multiplier
        hidden = [x]
        for module, of_depth in zip(self.prediction_modules, embedded.chunk(len(depths), 1), strict=True):
            hidden.append(module.run(torch.cat((of_depth, hidden[-1])), context, residency))
        return torch.cat(hidden, 1)

    @override
    def units(self) -> Iterator[Unit]:
        yield from ([leaf] for leaf in parameters_by_module(self.norm))
        for module in self.prediction_modules:
            yield from module.units()
        yield from ([leaf] for leaf in parameters_by_module(self.head))
        yield from ([[table]] for table in self.owned if isinstance(table, Parameter))

    @cached_property
    @override
    def gather_keys(self) -> list[Parameter]:
        of_modules = [key for module in self.prediction_modules for key in module.gather_keys]
        norm = [] if self.norm.weight is None else [self.norm.weight]
        looked_up = [lookup.table for lookup in self.lookup if lookup is not None]
        return [*norm, *looked_up, *of_modules, self.head.table]

    @override
    def run(self, x: Tensor, context: PassContext, residency: ParameterResidency) -> Tensor:
        if self.norm.weight is None:
            result: Tensor = self(x, context)
            return result
        return super().run(x, context, residency)

    @property
    def added_in_forward(self) -> list[Parameter]:
        """Matrix of the output layer, because the loss adds to its gradient in the forward pass."""
        return [self.head.table]

    @override
    def backward_order(self) -> Iterator[tuple[Parameter | None, list[Parameter]]]:
        yield None, [self.head.table]
        for module in reversed(self.prediction_modules):
            for gathered, added in module.backward_order():
                yield module.gather_keys[0] if gathered is None else gathered, added
        if (lookup := self.lookup[0]) is not None:
            yield None, [lookup.table]
        if self.norm.weight is not None:
            yield self.norm.weight, parameters_in(self.norm)[::-1]

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        modules = self.prediction_modules
        of_modules = [matrix for module in modules for matrix in module.matrices]
        return [*of_modules, *[self.head.matrix] * (1 + len(modules))]

    @property
    @override
    def elementwise(self) -> list[ElementwiseSize]:
        modules = self.prediction_modules
        of_modules = [size for module in modules for size in module.elementwise]
        return [
            *of_modules,
            ElementwiseSize("norm", *self.norm.size),
            *self.head.elementwise * (1 + len(modules)),
        ]


class Transformer(nn.Module):
    """Transformer, or the part of it with the blocks of `span`, as a ModelPart.

    Parameters have no memory before they are in buckets.

    Args:
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.
        span: Blocks of this part; None for the whole model.
        table: Table of the embedding if another part on this rank holds it; None otherwise.

    Attributes:
        table: Table of the embedding if this part or an earlier one on this rank holds it; None otherwise.
        rotates: True if the family rotates queries and keys by their positions.
        rotary_positions: Positions [s] int64 for the rotation instead of those of the inputs. None in a run.
            The layout check rotates a short sequence as if it was near the end of a long one.
    """

    def __init__(
        self,
        shape: ModelShape,
        layer_context: LayerContext,
        span: LayerRange | None = None,
        table: Parameter | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.layer_context = shape, layer_context
        self.residency, self.rotates = ParameterResidency(), shape.positions == "rotary"
        self.rotary_positions: Tensor | None = None
        self.span = span if span is not None else LayerRange.all_of(shape.layers)
        layers: list[TransformerLayer] = []
        if self.span.has_embedding:
            table = self._embedding_table()
            layers.append(Embedding(shape, layer_context, table))
        layers += [
            (MixtureBlock if shape.is_mixture(index) else TransformerBlock)(index, shape, layer_context)
            for index in range(self.span.first, self.span.last)
        ]
        if self.span.has_head:
            layers.append(self._last_layer(table))
        self.table = table
        self.layers = tuple(layers)
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)

    def _embedding_table(self) -> Parameter:
        """Return the table [V, h] of the embedding. If two stages hold it, its shard says so."""
        shape, name = self.shape, "embedding.tokens.weight"
        shard = vocabulary_shard(name, shape.vocabulary, shape.hidden, self.layer_context)
        if shape.table_uses_at_end:
            shard = replace(shard, stage_copy=self.span.tied_stage, stage_copies=self.span.tied_stages)
        return Parameter(shard, initial="table")

    def _last_layer(self, embedding: Parameter | None) -> Predictor:
        """Return the last layer, which may use the table of the embedding.

        Args:
            embedding: The table of the embedding if a part on this rank has it. Otherwise the last layer has
                a copy of it, if it needs one.
        """
        shape, layer_context, uses = self.shape, self.layer_context, self.shape.table_uses_at_end
        if shape.head == "scalar":
            return Predictor(shape, layer_context, None)
        in_other_part = embedding is not None and not self.span.has_embedding
        owned: list[Parameter] = []
        if embedding is None and uses:
            embedding = self._embedding_table()
            embedding.uses = uses
            owned.append(embedding)
        elif embedding is not None:
            embedding.uses += uses
            embedding.separate_lookups = uses if in_other_part else 0
        if shape.tied:
            table = embedding
        else:
            shard = vocabulary_shard("head.weight", shape.vocabulary, shape.hidden, layer_context)
            table = Parameter(shard, initial="table")
            owned.append(table)
        lookup = None
        if shape.mtp_layers and embedding is not None:
            lookup = VocabularyEmbedding(embedding, layer_context, number=int(in_other_part))
        return Predictor(shape, layer_context, table, lookup, owned)

    def units(self) -> Iterator[Unit]:
        """Return the units of all layers in the order of the forward pass. No parameter is in two of them."""
        return (unit for layer in self.layers for unit in layer.units())

    def forward(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Tensor:
        """Return the hidden states after this part, after the final norm on the last part; see ModelPart."""
        context = self._pass_context(inputs)
        shared = context.rotary.all_tables if context.rotary is not None else ()
        x = inputs.tokens if hidden is None else hidden
        for is_block, layers in groupby(self.layers, lambda layer: layer.is_block):
            passes = [LayerPass(self._pass(layer, context), layer.all_parameters) for layer in layers]
            if is_block:
                x = self.layer_context.saved_policy.run(passes, x, shared)
            else:
                for each in passes:
                    x = each.compute(x)
        return x

    def run_layer(self, layer: Layer, inputs: ModelInputs, x: Tensor) -> Tensor:
        """Return the output of one layer for the input `x`. The parameters of the layer must be gathered."""
        result: Tensor = layer(x, self._pass_context(inputs))
        return result

    def _pass(self, layer: TransformerLayer, context: PassContext) -> Callable[[Tensor], Tensor]:
        if self.residency.gathers:
            return partial(layer.run, context=context, residency=self.residency)
        return partial(layer, context=context)

    def _pass_context(self, inputs: ModelInputs) -> PassContext:
        tensor, rotary = self.layer_context.tensor, None
        rows = inputs.positions
        if self.layer_context.sequence_parallel:
            rows = rows.chunk(tensor.size)[tensor.rank]
        if self.rotates and inputs.cache is None:
            positions = inputs.positions if self.rotary_positions is None else self.rotary_positions
            rotary = Rotary.of(self.shape, positions, self.dtype, text_length=inputs.text_length)
        return PassContext(inputs, rows, rotary, self.residency)

    def predict(self, hidden: Tensor, compute: Callable[[Any, Tensor], Computed]) -> Computed:
        """Return the result of `compute` for the output of the last part, with its parameters gathered."""
        last = self.layers[-1]
        assert isinstance(last, Predictor)
        head = last.head
        if not self.residency.gathers:
            return compute(head, hidden)
        with self.residency.in_memory(head.table):
            return compute(head, hidden)

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """Return the shape of the tensors that are sent between parts."""
        tensor, context = self.layer_context.tensor.size, self.layer_context.context.size
        rows = self.shape.sequence // context // (tensor if self.layer_context.sequence_parallel else 1)
        return rows, micro_size, self.shape.hidden

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors that are sent between parts."""
        return self.layers[0].gather_keys[0].dtype
