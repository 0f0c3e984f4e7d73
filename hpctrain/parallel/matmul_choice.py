"""Choice of the class that computes the products of a layer."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.parallel.fp8.delayed_matmul import DelayedMatmul
from hpctrain.parallel.fp8.quantized_matmul import QuantizedMatmul
from hpctrain.parallel.fp8.recipes import GRADIENT_FORMS, RECIPES
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.shards import Parameter


def make_matmul(weights: Sequence[Parameter], groups: LayerContext) -> Matmul:
    """Return the products of a layer with `weights`, of which at least the first one is known."""
    fp8 = groups.products.fp8
    if fp8 is None or fp8.excludes(weights[0].shard.name):
        return Matmul(weights, groups)
    recipe, form = RECIPES[fp8.recipe], GRADIENT_FORMS[fp8.gradients]
    if recipe.delayed:
        return DelayedMatmul(weights, groups, recipe, fp8.history, form, fp8.messages)
    return QuantizedMatmul(weights, groups, recipe, form, fp8.messages)
