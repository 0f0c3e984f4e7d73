"""Products of quantized matrices against torch's own, and against numpy."""

from __future__ import annotations

import pytest
import torch

from hpctrain.parallel.fp8 import multiply
from hpctrain.parallel.fp8.formats import E4M3, E5M2, Fp8Format
from hpctrain.parallel.fp8.multiply import emulated_product, is_native, multiply_quantized, native_product
from hpctrain.parallel.fp8.quantize import QuantizedTensor
from hpctrain.parallel.fp8.recipes import RECIPES, ScalingRecipe
from tests.parallel.fp8.given import normal

M, N, K = 48, 80, 272
PAIRS = {"forward": (E4M3, E4M3), "gradient": (E5M2, E4M3), "other way": (E4M3, E5M2)}


def pair(
    recipe: ScalingRecipe, forms: tuple[Fp8Format, Fp8Format], k: int = K
) -> tuple[QuantizedTensor, QuantizedTensor]:
    left, right = normal(M, k) * torch.logspace(-3, 3, M)[:, None], normal(N, k, seed=1) * 1e-4
    return recipe.tokens.quantize(left, forms[0]), recipe.weights.quantize(right, forms[1])


@pytest.mark.parametrize("forms", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("name", ["tensor", "row"])
def test_the_emulated_product_is_torchs(name: str, forms: tuple[Fp8Format, Fp8Format]) -> None:
    left, right = pair(RECIPES[name], forms)
    for dtype, apart in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)):
        expected = native_product(left, right, dtype)
        found = emulated_product(left, right, dtype)
        assert found.dtype == expected.dtype == dtype
        assert float((found.float() - expected.float()).abs().max()) <= apart * float(expected.abs().max())


@pytest.mark.parametrize("k", [K, 33])
@pytest.mark.parametrize("forms", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_product_is_that_of_the_numbers_that_it_stands_for(
    recipe: ScalingRecipe, forms: tuple[Fp8Format, Fp8Format], k: int
) -> None:
    left, right = pair(recipe, forms, k)
    exact = left.dequantized().double() @ right.dequantized().double().t()
    for dtype, apart in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)):
        found = multiply_quantized(left, right, dtype)
        assert found.dtype == dtype
        assert float((found.double() - exact).abs().max()) <= apart * float(exact.abs().max())


def test_a_device_multiplies_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiply, "has_native", lambda *_: True)
    given = []
    monkeypatch.setattr(multiply, "native_product", lambda *args: given.append(args) or native_product(*args))
    for name, recipe in RECIPES.items():
        for forms in PAIRS.values():
            left, right = pair(recipe, forms)
            given.clear()
            found = multiply_quantized(left, right, torch.bfloat16)
            assert bool(given) == (name in {"tensor", "delayed", "row"})
            torch.testing.assert_close(found, emulated_product(left, right, torch.bfloat16))
    odd, gradients = pair(RECIPES["tensor"], PAIRS["forward"], 33), pair(RECIPES["tensor"], (E5M2, E5M2))
    mixed = pair(RECIPES["tensor"], PAIRS["forward"])[0], pair(RECIPES["row"], PAIRS["forward"])[1]
    assert not any(is_native(*operands, torch.bfloat16) for operands in (odd, gradients, mixed))


@pytest.mark.parametrize("name", ["row", "block", "mx"])
def test_a_matrix_that_was_quantized_for_another_product_is_refused(name: str) -> None:
    left, right = pair(RECIPES[name], PAIRS["forward"])
    with pytest.raises(AssertionError):
        multiply_quantized(left.transposed(), left.transposed(), torch.float32)
    assert multiply_quantized(right, right, torch.float32).shape == (N, N)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_plan_finds_the_shapes_without_numbers(recipe: ScalingRecipe) -> None:
    left, right = (torch.empty(M, K, device="meta"), torch.empty(N, K, device="meta"))
    found = multiply_quantized(
        recipe.tokens.quantize(left, E4M3), recipe.weights.quantize(right, E4M3), torch.bfloat16
    )
    assert found.is_meta and found.shape == (M, N) and found.dtype == torch.bfloat16
