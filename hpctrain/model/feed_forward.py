"""Feed-forward part of a block: two linear layers with an activation between them, which may be gated."""

from __future__ import annotations

from torch import Tensor, nn

from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, elementwise_kind
from hpctrain.parallel.tensor import ColumnLinear, Partition, RowLinear


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
        biased = shape.mlp_bias
        self.up = ColumnLinear(
            shape.hidden, outputs, biased, layer_context, shared_input, adapters=shape.adapters
        )
        self.down = RowLinear(
            f"{name}.down", inner, shape.hidden, biased, layer_context, adapters=shape.adapters
        )

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
