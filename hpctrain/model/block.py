"""Block of a transformer: attention and a feed-forward part, with norms and residual connections.

The head of `model/transformer.py` shows it in order, with shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.model.attention.latent_attention import LatentAttention
from hpctrain.model.attention.rotary import Rotary
from hpctrain.model.attention.self_attention import Attention
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.norm import Norm
from hpctrain.model.part import Layer, LayerKind
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, elementwise_kind
from hpctrain.parallel.random import dropout
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.shards import Partition
from hpctrain.parallel.tensor import ColumnLinear, LinearSpec, RowLinear

if TYPE_CHECKING:
    from hpctrain.model.mixtures.mixture import Mixture


@dataclass(frozen=True)
class PassContext:
    """Inputs of a transformer's layers in one pass, besides the hidden states.

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
    """Layer of a transformer, which maps hidden states, or token ids, to hidden states."""

    def run(self, x: Tensor, context: PassContext, residency: ParameterResidency) -> Tensor:
        """Return `self(x, context)`, with the layer's parameters gathered in forward and backward."""
        needs_hook = residency.gathers and torch.is_grad_enabled() and not x.requires_grad
        if needs_hook and any(parameter.requires_grad for parameter in self.all_parameters):
            x = x.detach().requires_grad_()  # so that the backward pass of the layer ends at a hook
        return residency.run_layer(self.gather_keys[0], partial(self, context=context), x)


class FeedForward(nn.Module):
    """Feed-forward part, [s or s/t, b, h] -> the same shape.

    The first layer is split by columns over the tensor axis, and the second one by rows.

    Args:
        name: Name of the layer, with which names of parameters begin.
        shape: Sizes of the model.
        layer_context: Process groups and settings of this rank's layers.
        inner: Features between the layers; None for those of the shape.
        shared_input: True if other layers save the same input.
    """

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        layer_context: LayerContext,
        inner: int | None = None,
        shared_input: bool = False,
    ) -> None:
        super().__init__()
        inner = shape.mlp if inner is None else inner
        rows = Partition.split(inner, layer_context.tensor)
        self.activation, self.functions = ACTIVATIONS[shape.activation], layer_context.functions
        outputs = [(f"{name}.gate", rows)] if self.activation.gated else []
        outputs = [*outputs, (f"{name}.up", rows)]
        up = LinearSpec(shape.hidden, outputs, shape.mlp_bias, shared_input, shape.adapters)
        self.up = ColumnLinear(up, layer_context)
        down = LinearSpec(rows, [(f"{name}.down", shape.hidden)], shape.mlp_bias, adapters=shape.adapters)
        self.down = RowLinear(down, layer_context)

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations between the two layers."""
        inner = self.down.weights[0].shard.shape[1]
        return [ElementwiseSize(elementwise_kind(self.activation), inner, True)]

    def forward(self, x: Tensor) -> Tensor:
        """Return down(activation(up(x)))."""
        inner = self.functions.activate(self.up(x), self.activation, self.up.split_sizes)
        output: Tensor = self.down(inner)
        return output


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
        kind_name: Name of the kind of the layer.
        site: Number of the first of the two places with dropout, for `DropoutSource`.
        probability: Probability with which dropout drops an element.
        parallel: True if both parts read the same hidden states.
        multiplier: Factor of the outputs of both parts.
    """

    is_block = True
    kind_name = "block"
    feed_forward: FeedForward | Mixture

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
        self.feed_forward = self._make_feed_forward(f"{name}.feed_forward", shape, layer_context)
        self.feed_forward_output_norm = norm("feed_forward_output_norm", after)
        self.core, self.uses_rotary = self.attention.core, self.attention.uses_rotary
        unrotated = shape.positions == "rotary" and not self.uses_rotary
        self.kind = LayerKind(self.kind_name, shape.window(index), unrotated)

    def _make_feed_forward(
        self, name: str, shape: ModelShape, layer_context: LayerContext
    ) -> FeedForward | Mixture:
        """Return the feed-forward part."""
        shared = shape.parallel_residual == "one_norm"
        return FeedForward(name, shape, layer_context, shared_input=shared)

    def run_feed_forward(self, x: Tensor, context: PassContext) -> Tensor:  # noqa: ARG002
        """Return the output of the feed-forward part for its input."""
        output: Tensor = self.feed_forward(x)
        return output

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        """Return hidden states of the shape of x, [s or s/t, b, h]."""
        inputs, source, positions = context.inputs, context.inputs.dropout, context.positions
        attention_input = x if self.attention_norm is None else self.attention_norm(x)
        attended = self.attention(attention_input, context.rotary, inputs.documents, inputs.cache)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        if source is not None:
            attended = dropout(attended, source, self.site, positions, self.probability)
        block_input, x = x, self._sum(x, attended)

        if self.feed_forward_norm is not None:
            feed_forward_input = self.feed_forward_norm(block_input if self.parallel else x)
        else:
            feed_forward_input = attention_input if self.parallel else x
        output = self.run_feed_forward(feed_forward_input, context)
        if self.feed_forward_output_norm is not None:
            output = self.feed_forward_output_norm(output)
        if source is not None:
            output = dropout(output, source, self.site + 1, positions, self.probability)
        return self._sum(x, output)

    def _sum(self, x: Tensor, added: Tensor) -> Tensor:
        """Return the hidden states with the output of a part added to them."""
        return x + added if self.multiplier == 1 else torch.add(x, added, alpha=self.multiplier)

    @property
    @override
    def elementwise(self) -> list[ElementwiseSize]:
        norms = sum(isinstance(layer, Norm) for layer in self.children())
        context = ElementwiseSize("norm", norms * self.hidden), ElementwiseSize("add", 2 * self.hidden)
        return [*context, *self.attention.elementwise, *self.feed_forward.elementwise]
