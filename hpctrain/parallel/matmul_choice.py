"""What multiplies in each format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hpctrain.parallel.fp8.quantized_matmul import DelayedMatmul, QuantizedMatmul
from hpctrain.parallel.fp8.recipes import GRADIENT_FORMS, RECIPES
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.shards import Parameter

PRODUCTS: Mapping[torch.dtype, type[Matmul]] = dict.fromkeys(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64), Matmul
)
"""By `Precision.product`."""


def make_matmul(weights: Sequence[Parameter], groups: LayerContext) -> Matmul:
    """The products of a layer's matrix, in the format of the groups; the first of its weights is there."""
    how = groups.fp8
    if how is None or how.excludes(weights[0].shard.name):
        return PRODUCTS[groups.product_format](weights, groups)
    recipe, form = RECIPES[how.recipe], GRADIENT_FORMS[how.gradients]
    if recipe.delayed:
        return DelayedMatmul(weights, groups, recipe, how.history, form, how.messages)
    return QuantizedMatmul(weights, groups, recipe, form, how.messages)
