"""Feed-forward part of a block: two linear layers with an activation between them, which may be gated."""

from __future__ import annotations

from torch import Tensor, nn

from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage, total
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, kind_of
from hpctrain.parallel.tensor import ColumnLinear, RowLinear, RowPartition


class FeedForward(nn.Module):
    """Feed-forward part, [s or s/t, b, h] -> the same shape.

    The first layer is split by columns over the tensor axis, and the second one by rows.

    Args:
        name: Name of the layer, with which names of parameters begin.
        shape: Sizes of the model.
        groups: Process groups and settings of this rank's layers.
        inner: Features between the layers; None for those of the shape.
        shared_input: True if other layers save the same input.
    """

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        groups: LayerContext,
        inner: int | None = None,
        shared_input: bool = False,
    ) -> None:
        super().__init__()
        inner = shape.mlp if inner is None else inner
        rows = RowPartition.split(inner, groups.tensor)
        self.activation, self.functions = ACTIVATIONS[shape.activation], groups.functions
        outputs = [(f"{name}.gate", rows)] if self.activation.gated else []
        outputs = [*outputs, (f"{name}.up", rows)]
        biased = shape.traits.feed_forward_bias
        self.up = ColumnLinear(shape.hidden, outputs, biased, groups, shared_input, adapters=shape.adapters)
        self.down = RowLinear(f"{name}.down", inner, shape.hidden, biased, groups, adapters=shape.adapters)

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations between the two layers."""
        inner = self.down.weights[0].shard.shape[1]
        return [ElementwiseSize(kind_of(self.activation), inner, True)]

    @property
    def expanded_features(self) -> int:
        """Features of a token between the two layers."""
        return sum(self.up.split_sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(activation(up(x)))."""
        inner = self.functions.activate(self.up(x), self.activation, self.up.split_sizes)
        output: Tensor = self.down(inner)
        return output

    def saved(self, at: ActivationSizes) -> list[SavedStorage]:
        """Return what autograd saves: input and output of the activation.

        Of a gated activation these are gate and up, which are one tensor, their product, and the activation
        of the gate if torch computes it.
        """
        widest = [at.features(self.expanded_features)] if self.activation.gated else []
        kept = [*self._factor(at), *self.down.saved_input(at), *self.down.adapter_saved(at)]
        return [*self.up.adapter_saved(at), *widest, *kept]

    def _factor(self, at: ActivationSizes) -> list[SavedStorage]:
        one = self.activation.gated and self.functions.compiles(self.activation)
        return [] if one else [at.features(self.up.split_sizes[-1])]

    def workspace(self, at: ActivationSizes) -> int:
        """Return the temporary bytes of the backward pass.

        They are gradients of the hidden states, before and after, and of the widest features between, and
        what the matrix products need.
        """
        hidden = self.down.weights[0].shard.shape[0]
        passing = max(layer.product.workspace_bytes(at.tokens, at) for layer in (self.up, self.down))
        return at.features(self.expanded_features + 2 * hidden).bytes + passing

    def passing(self, at: ActivationSizes) -> tuple[int, int]:
        """Return the bytes beside what is saved if weight gradients are deferred.

        The first number is the peak during the layer's own backward pass, the second one what remains after
        it.
        """
        hidden = at.features(self.down.weights[0].shard.shape[0]).bytes
        return hidden, hidden - (total(self._factor(at)) if self.activation.gated else 0)
