"""Block with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from typing_extensions import override

from hpctrain.model.block import PassContext, TransformerBlock
from hpctrain.model.mixtures.mixture import Mixture
from hpctrain.model.part import Unit, parameters_by_module
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import MatrixSize
from hpctrain.parallel.shards import Parameter


class MixtureBlock(TransformerBlock):
    """TransformerBlock with a mixture of experts in place of its feed-forward part."""

    kind_name = "mixture"
    feed_forward: Mixture

    def __init__(self, index: int, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__(index, shape, layer_context)
        self.auxiliary_loss_names = self.feed_forward.auxiliary_loss_names

    @override
    def _make_feed_forward(self, name: str, shape: ModelShape, layer_context: LayerContext) -> Mixture:
        return Mixture(name, shape, layer_context)

    @override
    def run_feed_forward(self, x: Tensor, context: PassContext) -> Tensor:
        output: Tensor = self.feed_forward(x, context.inputs, context.residency)
        return output

    def units(self) -> Iterator[Unit]:
        """Yield the units of the block. Experts are one of their own, since they are needed later."""
        experts = self.feed_forward.experts
        yield [leaf for leaf in parameters_by_module(self) if leaf[0] is not experts.gate_up]
        yield list(parameters_by_module(experts))

    @override
    def backward_order(self) -> Iterator[tuple[Parameter | None, list[Parameter]]]:
        experts = self.feed_forward.experts
        others = [p for p in self.all_parameters[::-1] if p not in set(experts.deferred_parameters)]
        yield experts.gate_up, []
        yield None, [*experts.deferred_parameters, *others]

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        # Router [n, h] and shared gate [1, h] are no MatmulLayers, so `super()` does not list them. They
        # multiply the same input, so they count as one matrix [n + 1, h].
        experts, hidden = self.feed_forward.router.weight.shard.shape
        rows = experts if self.feed_forward.shared_gate is None else experts + 1
        return [*super().matrices, MatrixSize(rows, hidden, "whole")]
