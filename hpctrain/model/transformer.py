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
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from hpctrain.model.attention.latent_attention import LatentAttention
from hpctrain.model.attention.rotary import Rotary
from hpctrain.model.attention.self_attention import Attention
from hpctrain.model.feed_forward import FeedForward
from hpctrain.model.inputs import ModelInputs, field_ahead
from hpctrain.model.mixtures.mixture import Mixture
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
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.backward.saved_policy import LayerPass
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, MatrixSize
from hpctrain.parallel.random import dropout
from hpctrain.parallel.replicated_linear import ReplicatedLinear
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.scalar_head import ScalarHead
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, vocabulary_shard


@dataclass(frozen=True)
class PassContext:
    """Inputs of a transformer's layers in one pass beside hidden states.

    Attributes:
        inputs: The micro-batch.
        positions: Positions of the rows of x between split layers, int64 [s or s/t].
        rotary: Tables that all blocks share; None in families without rotation.
        residency: Gathers parameters of a layer that are not in its first unit.
    """

    inputs: ModelInputs
    positions: Tensor
    rotary: Rotary | None
    residency: ParameterResidency = field(default_factory=ParameterResidency)


class TransformerLayer(Layer):
    """Layer that is one step of a pass over hidden states."""

    def run(self, x: Tensor, context: PassContext, residency: ParameterResidency) -> Tensor:
        """Return `self(x, context)`, with the layer's parameters gathered in forward and backward."""
        unseen = residency.gathers and torch.is_grad_enabled() and not x.requires_grad
        if unseen and any(parameter.requires_grad for parameter in self.all_parameters):
            x = x.detach().requires_grad_()  # so that a hook sees the end of its backward pass
        return residency.run_layer(self.gather_keys[0], partial(self, context=context), x)


class PositionEmbedding(nn.Module):
    """Learned vector per position that is added to [s or s/t, b, h]."""

    def __init__(self, name: str, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__()
        size = (shape.sequence, shape.hidden)
        self.table = Parameter(
            Shard.replicated(f"{name}.weight", size, layer_context.sequence_partial), initial="table"
        )

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


class TransformerBlock(TransformerLayer):
    """Attention and feed-forward part, each with a residual connection and with norms.

    Norms are of the inputs of both parts (`attention_norm`, `feed_forward_norm`), of their outputs
    (`attention_output_norm`, `feed_forward_output_norm`), or of both. Parallel parts read the same hidden
    states, and may share the norm of their inputs. Norms that a model does not have are None.

    Args:
        index: Number of the block, from 0 on.
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.

    Attributes:
        site: Number of the first of the two places with dropout, for `DropoutSource`.
        probability: Probability with which dropout drops an element.
        parallel: True if both parts read the same hidden states.
        multiplier: Factor of the outputs of both parts.
    """

    is_block = True

    def __init__(self, index: int, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__()
        name = f"blocks.{index}"
        self.site, self.hidden, self.probability = 1 + 2 * index, shape.hidden, shape.dropout
        self.parallel, self.multiplier = shape.parallel_residual != "none", shape.residual_multiplier
        before, after = shape.norm_placement != "after", shape.norm_placement != "before"
        shared = shape.parallel_residual == "one_norm"

        def norm(layer: str, exists: bool) -> Norm | None:
            return Norm(f"{name}.{layer}", shape, layer_context) if exists else None

        self.attention_norm = norm("attention_norm", before)
        attention = Attention if shape.latent is None else LatentAttention
        self.attention = attention(f"{name}.attention", shape, layer_context, index, shared)
        self.attention_output_norm = norm("attention_output_norm", after)
        self.feed_forward_norm = norm("feed_forward_norm", before and not shared)
        self.feed_forward: FeedForward | Mixture
        if shape.is_mixture(index):
            self.feed_forward = Mixture(f"{name}.feed_forward", shape, layer_context)
            self.auxiliary_loss_names = self.feed_forward.auxiliary_loss_names
        else:
            self.feed_forward = FeedForward(f"{name}.feed_forward", shape, layer_context, shared_input=shared)
        self.feed_forward_output_norm = norm("feed_forward_output_norm", after)
        self.core, self.uses_rotary = self.attention.core, self.attention.uses_rotary
        unrotated = shape.positions == "rotary" and not self.uses_rotary
        name = "mixture" if shape.is_mixture(index) else "block"
        self.kind = LayerKind(name, shape.window(index), unrotated)

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        """Return hidden states of the shape of x, [s or s/t, b, h]."""
        inputs, source, positions = context.inputs, context.inputs.dropout, context.positions
        attention_input = _normed(self.attention_norm, x)
        attended = self.attention(attention_input, context.rotary, inputs.documents, inputs.cache)
        attended = _normed(self.attention_output_norm, attended)
        if source is not None:
            attended = dropout(attended, source, self.site, positions, self.probability)
        block_input, x = x, self._sum(x, attended)

        if not self.parallel:
            feed_forward_input = _normed(self.feed_forward_norm, x)
        elif self.feed_forward_norm is not None:
            feed_forward_input = self.feed_forward_norm(block_input)
        else:
            feed_forward_input = attention_input
        expanded: Tensor
        if isinstance(self.feed_forward, Mixture):
            expanded = self.feed_forward(feed_forward_input, inputs, context.residency)
        else:
            expanded = self.feed_forward(feed_forward_input)
        expanded = _normed(self.feed_forward_output_norm, expanded)
        if source is not None:
            expanded = dropout(expanded, source, self.site + 1, positions, self.probability)
        return self._sum(x, expanded)

    def _sum(self, x: Tensor, added: Tensor) -> Tensor:
        """Return the hidden states with the output of a part added to them."""
        return x + added if self.multiplier == 1 else torch.add(x, added, alpha=self.multiplier)

    def units(self) -> Iterator[Unit]:
        """Yield the units of the block. Experts are one of their own, since they are needed later."""
        if isinstance(self.feed_forward, Mixture):
            experts = list(parameters_by_module(self.feed_forward.experts))
            yield [
                leaf
                for leaf in parameters_by_module(self)
                if leaf[0] is not self.feed_forward.experts.gate_up
            ]
            yield experts
        else:
            yield from super().units()

    @override
    def backward_order(self) -> Iterator[tuple[Parameter | None, list[Parameter]]]:
        if isinstance(self.feed_forward, Mixture):
            experts = self.feed_forward.experts
            yield experts.gate_up, []
            yield (
                None,
                [
                    *experts.deferred_parameters,
                    *(p for p in self.all_parameters[::-1] if p not in set(experts.deferred_parameters)),
                ],
            )
        else:
            yield from super().backward_order()

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        if not isinstance(self.feed_forward, Mixture):
            return super().matrices
        experts, hidden = self.feed_forward.router.weight.shard.shape
        rows = experts if self.feed_forward.shared_gate is None else experts + 1
        return [*super().matrices, MatrixSize(rows, hidden, "whole")]

    @property
    @override
    def elementwise(self) -> list[ElementwiseSize]:
        norms = sum(isinstance(layer, Norm) for layer in self.children())
        context = ElementwiseSize("norm", norms * self.hidden), ElementwiseSize("add", 2 * self.hidden)
        return [*context, *self.attention.elementwise, *self.feed_forward.elementwise]


class PredictionModule(TransformerBlock):
    """Module of multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2), of one depth k.

    It combines the hidden state of position i of the depth before with the embedding of token i + k, and its
    result predicts token i + k + 1:

        x = projection([embedding_norm(embedding), hidden_norm(hidden)])
        hidden of this depth = final_norm(block(x))

    The next depth reads the hidden states after `final_norm`, as depth 1 reads those after the final norm of
    the model. The paper leaves this open, and the published weights have one depth. Megatron-LM's
    MultiTokenPredictionLayer, MtpModel of transformers, vLLM and SGLang do the same.

    Args:
        depth: The depth, from 1 on.
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.
    """

    def __init__(self, depth: int, shape: ModelShape, layer_context: LayerContext) -> None:
        index = shape.layers + depth - 1
        super().__init__(index, shape, layer_context)

        def norm(layer: str) -> Norm:
            return Norm(f"blocks.{index}.{layer}", shape, layer_context)

        self.embedding_norm, self.hidden_norm = norm("embedding_norm"), norm("hidden_norm")
        outputs = [(f"blocks.{index}.projection", shape.hidden)]
        self.projection = ReplicatedLinear(2 * shape.hidden, outputs, layer_context)
        self.final_norm = norm("final_norm")

    @override
    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        """Return the normalized hidden states of this depth, [s or s/t, b, h].

        Args:
            x: Embeddings, and below them the hidden states of the depth before: [2 s or 2 s/t, b, h].
            context: Inputs of the pass.
        """
        embedded, hidden = x.chunk(2)
        normed = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1)
        result: Tensor = self.final_norm(super().forward(self.projection(normed), context))
        return result


class Predictor(TransformerLayer):
    """Final norm, modules of multi-token prediction if there are any, and output layer.

    Only training computes the modules. The results of all depths are then side by side, as sequences of a
    larger micro-batch.

    Args:
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.
        table: Matrix of the output layer, which has one row per token; None for a scalar output.
        lookup: Lookup in the table of the embedding, for modules of multi-token prediction.
        owned: Tables that belong to this layer and not to an embedding on this rank.
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
        self.prediction_modules = nn.ModuleList()
        if lookup is not None:
            depths = range(1, shape.mtp_layers + 1)
            self.prediction_modules.extend(PredictionModule(k, shape, layer_context) for k in depths)
            modules = self.modules_of_depths
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

    @property
    def modules_of_depths(self) -> list[PredictionModule]:
        """Modules of multi-token prediction, from depth 1 on."""
        return [each for each in self.prediction_modules if isinstance(each, PredictionModule)]

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        """Return the normalized last hidden states, which are the input of the output layer.

        With d modules of multi-token prediction the result is [s or s/t, (1 + d) b, h] in training.
        """
        result: Tensor = self.norm(x)
        if len(self.prediction_modules) and torch.is_grad_enabled():
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
        for module, of_depth in zip(self.modules_of_depths, embedded.chunk(len(depths), 1), strict=True):
            hidden.append(module.run(torch.cat((of_depth, hidden[-1])), context, residency))
        return torch.cat(hidden, 1)

    @override
    def units(self) -> Iterator[Unit]:
        yield from ([leaf] for leaf in parameters_by_module(self.norm))
        for module in self.modules_of_depths:
            yield from module.units()
        yield from ([leaf] for leaf in parameters_by_module(self.head))
        yield from ([[table]] for table in self.owned if isinstance(table, Parameter))

    @cached_property
    @override
    def gather_keys(self) -> list[Parameter]:
        of_modules = [key for module in self.modules_of_depths for key in module.gather_keys]
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
        for module in reversed(self.modules_of_depths):
            for held, added in module.backward_order():
                yield module.gather_keys[0] if held is None else held, added
        if (lookup := self.lookup[0]) is not None:
            yield None, [lookup.table]
        if self.norm.weight is not None:
            yield self.norm.weight, parameters_in(self.norm)[::-1]

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        modules = self.modules_of_depths
        of_modules = [matrix for module in modules for matrix in module.matrices]
        return [*of_modules, *[self.head.matrix] * (1 + len(modules))]

    @property
    @override
    def elementwise(self) -> list[ElementwiseSize]:
        modules = self.modules_of_depths
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
            TransformerBlock(index, shape, layer_context) for index in range(self.span.first, self.span.last)
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
            # The schedule decides in which order the layers of two parts add their gradients.
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

    @property
    def predictor(self) -> Predictor:
        """The last layer, on the part that has the output layer."""
        last = self.layers[-1]
        assert isinstance(last, Predictor)
        return last

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
        head = self.predictor.head
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


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    """Return x after a norm, or x if there is none."""
    if norm is None:
        return x
    result: Tensor = norm(x)
    return result
