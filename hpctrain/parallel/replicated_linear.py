"""Linear layer whose matrix every tensor rank holds, and features that all heads of all ranks share.

Latent attention compresses hidden states to few features before it splits heads over tensor ranks:

    x [s or s/t, b, h] ── ReplicatedLinear ── latents [s or s/t, b, r] ── norm ── ColumnLinear (its heads)

Under sequence parallelism each rank compresses its piece of the sequence, and the gradients of the matrix are
partial sums. Otherwise all ranks compute the same: the ColumnLinear behind it sums the gradient of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Shard
from hpctrain.parallel.tensor import ColumnAutograd, SplitLinear


class ReplicatedLinear(SplitLinear):
    """Linear layer Y = X A^T without messages, with A on every tensor rank.

    The input is [s, b, k] and the output [s, b, n]. Under sequence parallelism they are this rank's pieces,
    [s/t, b, k] and [s/t, b, n].
    Its products are not in 8 bits, because the scales of pieces of a sequence would depend on the layout.

    Args:
        inputs: Input features k.
        outputs: Name and number of features of each output.
        layer_context: Context of the layer.
        shared_input: True if another layer saves the same input for its backward pass.
    """

    cut = "replicated"
    autograd = ColumnAutograd

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[tuple[str, int]],
        layer_context: LayerContext,
        shared_input: bool = False,
    ) -> None:
        products = replace(layer_context.products, fp8=None)
        super().__init__(replace(layer_context.unsplit(), products=products), shared_input)
        partial = layer_context.sequence_partial
        for name, size in outputs:
            self.add_weight(Shard.replicated(f"{name}.weight", (size, inputs), partial), None)


def share_over_heads(x: Tensor, layer_context: LayerContext) -> Tensor:
    """Return features [s, b, n] that the heads of all tensor ranks use. Collective over tensor ranks.

    The backward pass sums the gradients of the ranks' heads.

    Args:
        x: The features; under sequence parallelism those of this rank's piece, [s/t, b, n].
        layer_context: Context of the layer.
    """
    if layer_context.tensor.size == 1:
        return x
    result: Tensor = _SharedOverHeads.apply(x, layer_context)
    return result


class _SharedOverHeads(torch.autograd.Function):
    """Gather of sequence pieces (or the identity without sequence parallelism), and its backward pass.

    The backward pass sums the gradients over tensor ranks, each of which has those of its own heads.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, layer_context: LayerContext) -> Tensor:
        ctx.layer_context = layer_context
        gathered = layer_context.gather_sequence(x)
        return x.view_as(x) if gathered is x else gathered

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The sum may overwrite its operand, which other functions may have received, too.
        return ctx.layer_context.tensor_sum(gradient.clone()), None
