"""Matrices in blocks, against numpy block by block; also parallel/fp8/recipes.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.parallel.fp8 import formats, quantize
from hpctrain.parallel.fp8.formats import E4M3, E5M2, Fp8Format, reducible_maximum
from hpctrain.parallel.fp8.quantize import ScaleBlocks, Scaling, block_maxima
from hpctrain.parallel.fp8.recipes import RECIPES
from tests.parallel.fp8.given import by_block, decibels, normal, quantized

SCALINGS = {
    "tensor": RECIPES["tensor"].tokens,
    "row": RECIPES["row"].tokens,
    "block": RECIPES["block"].tokens,
    "block of weights": RECIPES["block"].weights,
    "mx": RECIPES["mx"].tokens,
}
SHAPES = [(128, 256), (3, 5), (130, 33), (1, 700), (129, 128)]


def wide(*shape: int) -> torch.Tensor:
    """Numbers of very different magnitudes, with a row and a column of zeros."""
    values = normal(*shape) * torch.exp2(normal(*shape, seed=1) * 6)
    values[0, :], values[:, -1] = 0, 0
    return values


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_each_block_has_its_scale(scaling: Scaling, shape: tuple[int, int], form: Fp8Format) -> None:
    values = wide(*shape)
    exact = values.double().numpy()
    found = scaling.quantize(values, form)
    assert found.values.is_contiguous() and found.values.shape == shape
    assert found.scales.shape == scaling.blocks.counts(shape)
    assert found.bytes == values.numel() + found.scales.numel() * (1 if scaling.as_bytes else 4)
    expected = quantized(exact, form, *scaling.blocks)
    np.testing.assert_array_equal(found.dequantized().double().numpy(), expected)
    assert torch.equal(found.dequantized(torch.bfloat16).float(), found.dequantized())
    maxima = by_block(exact, *scaling.blocks, lambda block: np.full_like(block, np.abs(block).max()))
    assert set(np.unique(maxima)) == set(block_maxima(values, scaling.blocks).double().unique().tolist())


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_half_precision_and_transposed_memory_are_quantized_alike(scaling: Scaling) -> None:
    values = wide(130, 258).bfloat16()
    single, half = (scaling.quantize(each, E4M3) for each in (values.float(), values))
    across = scaling.quantize(values.t().contiguous().t(), E4M3)
    for other in (half, across):
        assert torch.equal(single.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(single.scales, other.scales)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_a_transposed_matrix_is_quantized_as_it_lies(scaling: Scaling) -> None:
    values = wide(260, 390)
    anew = scaling.quantize(values.t().contiguous(), E4M3)
    lying = scaling.transposed.quantize(values, E4M3).transposed()
    assert lying.blocks == anew.blocks and torch.equal(lying.scales, anew.scales)
    assert torch.equal(lying.values.view(torch.uint8), anew.values.view(torch.uint8))
    once = scaling.quantize(values, E4M3).transposed()
    assert torch.equal(once.dequantized(), scaling.quantize(values, E4M3).dequantized().t())
    square = scaling.blocks.rows == scaling.blocks.columns
    assert square == torch.equal(once.dequantized(), anew.dequantized())


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_parts_with_maxima_in_common_are_parts_of_the_whole(scaling: Scaling) -> None:
    """By columns, as two tensor ranks have them, of whole blocks where blocks are counted."""
    values = wide(64, 512)
    whole, parts = scaling.quantize(values, E5M2), values.split(256, 1)
    maxima = [reducible_maximum(scaling.maxima(part)) for part in parts]
    common = maxima if scaling.blocks.columns else [torch.maximum(*maxima)] * 2
    found = [scaling.quantize(part, E5M2, most) for part, most in zip(parts, common, strict=True)]
    assert torch.equal(
        torch.cat([each.values.view(torch.uint8) for each in found], 1), whole.values.view(torch.uint8)
    )
    assert all(
        set(each.fp32_scales.unique().tolist()) <= set(whole.fp32_scales.unique().tolist()) for each in found
    )


def test_beyond_maxima_of_before_numbers_are_the_largest() -> None:
    values = torch.tensor([[1.0, -700.0, 3.0, 448.0]])
    found = Scaling(ScaleBlocks()).quantize(values, E4M3, torch.tensor([[448.0]]))
    assert found.dequantized().tolist() == [[1.0, -448.0, 3.0, 448.0]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_what_is_not_finite_is_still_seen(scaling: Scaling, bad: float) -> None:
    values = normal(256, 256)
    values[200, 200] = bad
    assert not scaling.quantize(values, E4M3).dequantized()[200, 200].isfinite()
    before = scaling.maxima(normal(256, 256))
    late = scaling.quantize(values, E4M3, before).dequantized()
    assert not late[200, 200].isfinite() and int((~late.isfinite()).sum()) == 1


def test_every_recipe_scales_as_it_is_called() -> None:
    kinds = {name: (recipe.tokens, recipe.weights) for name, recipe in RECIPES.items()}
    assert kinds == {
        "tensor": (SCALINGS["tensor"],) * 2,
        "delayed": (SCALINGS["tensor"],) * 2,
        "row": (SCALINGS["row"],) * 2,
        "block": (SCALINGS["block"], SCALINGS["block of weights"]),
        "mx": (SCALINGS["mx"],) * 2,
    }
    assert [each.blocks for each in SCALINGS.values()] == [
        (None, None),
        (1, None),
        (1, 128),
        (128, 128),
        (1, 32),
    ]
    assert [name for name, scaling in SCALINGS.items() if scaling.as_bytes] == ["mx"]
    assert [name for name, recipe in RECIPES.items() if recipe.delayed] == ["delayed"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_rows_after_others_are_as_all_at_once(
    monkeypatch: pytest.MonkeyPatch, scaling: Scaling, dtype: torch.dtype
) -> None:
    """Also where columns lie behind each other, and where the last rows are not as many."""
    values = wide(300, 200).to(dtype)
    lying = values.t().contiguous().t()
    whole = scaling.quantize(values, E4M3)
    for module in (formats, quantize):
        monkeypatch.setattr(module, "ELEMENTS_AT_ONCE", 1000)
    for matrix in (values, lying):
        found = scaling.quantize(matrix, E4M3)
        assert found.values.stride() == matrix.stride()
        assert torch.equal(found.scales, whole.scales)
        assert torch.equal(found.values.view(torch.uint8), whole.values.view(torch.uint8))
        assert torch.equal(found.dequantized(), whole.dequantized())


def test_no_rows_are_no_error() -> None:
    for scaling in SCALINGS.values():
        assert scaling.quantize(torch.empty(0, 256), E4M3).dequantized().shape == (0, 256)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("form", "expected"), [(E4M3, 31.5), (E5M2, 25.6)], ids=["E4M3", "E5M2"])
def test_noise_of_gaussian_numbers_is_that_of_the_format(name: str, form: Fp8Format, expected: float) -> None:
    values = normal(1024, 1024)
    found = decibels(values, RECIPES[name].tokens.quantize(values, form).dequantized())
    assert float(found) == pytest.approx(expected, abs=0.1)


def test_blocks_keep_columns_of_different_magnitude_and_one_scale_does_not() -> None:
    values = normal(1024, 1024) * torch.exp2(torch.linspace(0, 15, 1024))
    worst = {
        name: float(decibels(values, recipe.tokens.quantize(values, E4M3).dequantized(), 0).min())
        for name, recipe in RECIPES.items()
    }
    assert min(worst["block"], worst["mx"]) > 30
    assert max(worst["tensor"], worst["row"]) < 20
