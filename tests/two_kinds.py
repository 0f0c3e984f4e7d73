"""A model with blocks of two kinds: every second one has a second, wider feed-forward."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hpctrain.model.feed_forward import FeedForward
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import PassContext, TransformerBlock
from hpctrain.parallel.activation_sizes import ActivationSizes, DeferredBytes, SavedStorage
from hpctrain.parallel.kernels.matmul_kernels import gradient_workspace
from hpctrain.parallel.layer_context import LayerContext

FACTOR = 3


class WideBlock(TransformerBlock):
    """A block, and after it a feed-forward of `FACTOR` times its width."""

    kind = "wide block"

    def __init__(self, index: int, shape: ModelShape, groups: LayerContext) -> None:
        super().__init__(index, shape, groups)
        wide = replace(shape, mlp=FACTOR * shape.mlp)
        self.wide = FeedForward(f"blocks.{index}.wide", wide, groups)

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        x = super().forward(x, context)
        wide: Tensor = self.wide(x)
        return x + wide

    def saved(self, at: ActivationSizes) -> list[SavedStorage]:
        return [*super().saved(at), at.row_features(self.hidden), *self.wide.saved(at)]

    def deferred_bytes(self, at: ActivationSizes) -> DeferredBytes:
        """See Layer: while its first feed-forward goes, the gradient before the second one is there, too."""
        held, passing = super().deferred_bytes(at)
        return DeferredBytes(held, passing + at.features(self.hidden).bytes)

    def workspace(self, at: ActivationSizes) -> int:
        widest = sum(self.wide.up.split_sizes)
        return at.features(widest + 2 * self.hidden).bytes + gradient_workspace(widest * self.hidden, at)


def block(index: int, shape: ModelShape, groups: LayerContext) -> TransformerBlock:
    """In place of TransformerBlock."""
    return (WideBlock if index % 2 else TransformerBlock)(index, shape, groups)
