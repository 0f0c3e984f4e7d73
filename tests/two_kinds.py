"""A model with blocks of two kinds: every second one has a second, wider feed-forward."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes, DeferredBytes, SavedStorage
from hpctrain.costs.layer_bytes.block_bytes import deferred_by_block, saved_by_block
from hpctrain.costs.layer_bytes.byte_functions import deferred_bytes, saved_storages, workspace_bytes
from hpctrain.costs.layer_bytes.matmul_bytes import gradient_workspace
from hpctrain.model.block import FeedForward, PassContext, TransformerBlock
from hpctrain.model.part import LayerKind
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.layer_context import LayerContext

FACTOR = 3


class WideBlock(TransformerBlock):
    """A block, and after it a feed-forward of `FACTOR` times its width."""

    def __init__(self, index: int, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__(index, shape, layer_context)
        wide = replace(shape, mlp=FACTOR * shape.mlp)
        self.kind = LayerKind("wide block")
        self.wide = FeedForward(f"blocks.{index}.wide", wide, layer_context)

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        x = super().forward(x, context)
        wide: Tensor = self.wide(x)
        return x + wide


@saved_storages.register
def _saved(layer: WideBlock, sizes: ActivationSizes) -> list[SavedStorage]:
    wide = saved_storages(layer.wide, sizes)
    return [*saved_by_block(layer, sizes), sizes.row_features(layer.hidden), *wide]


@deferred_bytes.register
def _deferred(layer: WideBlock, sizes: ActivationSizes) -> DeferredBytes:
    """While its first feed-forward goes, the gradient before the second one is there, too."""
    held, passing = deferred_by_block(layer, sizes)
    return DeferredBytes(held, passing + sizes.features(layer.hidden).bytes)


@workspace_bytes.register
def _workspace(layer: WideBlock, sizes: ActivationSizes) -> int:
    widest = sum(layer.wide.up.split_sizes)
    return sizes.features(widest + 2 * layer.hidden).bytes + gradient_workspace(widest * layer.hidden, sizes)


def block(index: int, shape: ModelShape, layer_context: LayerContext) -> TransformerBlock:
    """In place of TransformerBlock."""
    return (WideBlock if index % 2 else TransformerBlock)(index, shape, layer_context)
