"""Every operand of a layer's products is made of high precision, also where it is one that lies transposed.

What is quantized by scales that are powers of two, and again by others, is mostly the same; what tells them
apart are numbers so small beside others that one of the scales leaves them no digits. Of fp8/product.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.parallel.fp8 import product as product_module
from hpctrain.parallel.fp8.formats import E4M3, E5M2
from hpctrain.parallel.fp8.multiply import multiplied
from hpctrain.parallel.fp8.product import QuantizedProduct
from hpctrain.parallel.fp8.quantize import Quantized
from hpctrain.parallel.fp8.recipes import RECIPES, Recipe
from hpctrain.parallel.shard import Shard
from tests.parallel.fp8.given import normal, quantized
from tests.parallel.fp8.test_product import ALONE, CURRENT, parameter

M, N, K = 140, 150, 160


def spread(rows: int, columns: int, seed: int) -> Tensor:
    """Numbers whose magnitudes span so much that both formats run out of digits in any block."""
    return normal(rows, columns, seed=seed) * torch.exp2(12 * normal(rows, columns, seed=seed + 1))


@pytest.mark.parametrize("recipe", CURRENT.values(), ids=CURRENT)
def test_operands_are_of_high_precision(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    operands: list[Quantized] = []

    def watched(left: Quantized, right: Quantized, dtype: torch.dtype) -> Tensor:
        operands.extend((left, right))
        return multiplied(left, right, dtype)

    monkeypatch.setattr(product_module, "multiplied", watched)
    inputs, weight, gradient = spread(M, K, 0), spread(N, K, 2), spread(M, N, 4)
    product = QuantizedProduct([parameter(weight, Shard.whole("a", (N, K)))], ALONE, recipe)
    product.forward(inputs)
    product.input_gradient(gradient)
    product.add_weight_gradient(gradient, inputs)
    x, w, g = (each.double().numpy() for each in (inputs, weight, gradient))
    tokens, weights = recipe.tokens.blocks, recipe.weights.blocks
    expected = [
        *(quantized(x, E4M3, *tokens), quantized(w, E4M3, *weights)),
        *(quantized(g, E5M2, *tokens), quantized(w.T, E4M3, *weights)),
        *(quantized(g.T, E5M2, *tokens), quantized(x.T, E4M3, *tokens)),
    ]
    for found, numbers in zip(operands, expected, strict=True):
        assert np.array_equal(found.dequantized().double().numpy(), numbers)


@pytest.mark.parametrize("name", ["row", "block", "mx"])
def test_what_is_quantized_again_is_told_apart(name: str) -> None:
    """That the test above would see a transposed operand that is made of the one that lies otherwise."""
    tokens, values = RECIPES[name].tokens, spread(M, K, 0)
    again = tokens.quantized(tokens.quantized(values, E4M3).dequantized().t(), E4M3)
    assert not torch.equal(again.dequantized(), tokens.quantized(values.t(), E4M3).dequantized())
