"""Choice of the class that computes the products of a layer."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.parallel.fp8.delayed_matmul import DelayedMatmul
from hpctrain.parallel.fp8.quantized_matmul import QuantizedMatmul
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.shards import Parameter


def make_matmul(weights: Sequence[Parameter], layer_context: LayerContext) -> Matmul:
    """Return the products of a layer with its fused weights."""
    fp8 = layer_context.products.fp8
    if fp8 is None or fp8.excludes(weights[0].shard.name):
        return Matmul(weights, layer_context)
    return (DelayedMatmul if fp8.recipe.delayed else QuantizedMatmul)(weights, layer_context)
