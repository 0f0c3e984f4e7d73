"""Linear layer whose matrix every tensor rank holds, and features that all heads of all ranks share.

Latent attention compresses hidden states to few features before it splits heads over tensor ranks:

    x [s or s/t, b, h] ── ReplicatedLinear ── latents [s or s/t, b, r] ── norm ── ColumnLinear (its heads)

Under sequence parallelism each rank compresses its piece of the sequence, and the gradients of the matrix are
partial sums. Otherwise all ranks compute the same: the ColumnLinear behind it sums the gradient of its input.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hpctrain.parallel.backward.autograd import exchange
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter, split_shard
from hpctrain.parallel.tensor import ColumnAutograd, LinearSpec, SplitLinear


class ReplicatedLinear(SplitLinear):
    """Linear layer Y = X A^T without messages, with A on every tensor rank.

    The input is [s, b, k] and the output [s, b, n]. Under sequence parallelism they are this rank's pieces,
    [s/t, b, k] and [s/t, b, n].
    Its products are not in 8 bits, because the scales of pieces of a sequence would depend on the layout.

    Args:
        spec: Features and names, with the number of features of each output. It has no biases or adapters.
        layer_context: Context of the layer.
    """

    split = "replicated"
    autograd = ColumnAutograd

    def __init__(self, spec: LinearSpec, layer_context: LayerContext) -> None:
        assert not spec.biased and spec.adapters is None, "no model has them in such a layer"
        weights = []
        for name, rows in spec.outputs:
            shard = split_shard(f"{name}.weight", rows, spec.inputs, axes=frozenset())
            weights.append(Parameter(replace(shard, partial=layer_context.sequence_partial)))
        products = replace(layer_context.products, fp8=None)
        super().__init__(replace(layer_context.unsplit(), products=products), weights, [], spec.shared_input)


def share_over_heads(x: Tensor, layer_context: LayerContext) -> Tensor:
    """Return features [s, b, n] that the heads of all tensor ranks use. Collective over tensor ranks.

    The backward pass sums the gradients of the ranks' heads.

    Args:
        x: The features; under sequence parallelism those of this rank's piece, [s/t, b, n].
        layer_context: Context of the layer.
    """
    if layer_context.tensor.size == 1:
        return x

    def sum_gradients(gradient: Tensor) -> Tensor:
        # The sum may overwrite its operand, which other functions may have received, too.
        return layer_context.tensor_sum(gradient.clone())

    return exchange(x, layer_context.gather_sequence, sum_gradients)
