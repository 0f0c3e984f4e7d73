"""Softmax statistics of logits and their gradients, of torch and compiled and compared with exact ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.host.c_libraries import open_library
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions
from hpctrain.parallel.kernels.logits import SplitLogits

FORMATS = {torch.float32: 3e-6, torch.bfloat16: 4e-3}
"""How far gradients may be from the exact ones, in the norm."""

ROWS = 5


@pytest.fixture(scope="module", params=["torch", "compiled"])
def functions(request: pytest.FixtureRequest) -> LayerFunctions:
    return TORCH if request.param == "torch" else CompiledFunctions(open_library(compile_functions()))


def products_of(columns: int, width: int, form: torch.dtype, size: float = 3.0) -> Tensor:
    """Rows of which one has its largest logit last, one first; what is filled up is no number."""
    x = size * torch.randn(ROWS, width, generator=torch.Generator().manual_seed(columns))
    x[1, columns - 1], x[2, 0] = 4 * size, 4 * size
    x[:, columns:] = math.nan
    return x.to(form)


@pytest.mark.parametrize("multiplier", [1.0, 0.3])
@pytest.mark.parametrize("filled", [0, 7])
@pytest.mark.parametrize("columns", [1, 15, 16, 33, 1024, 1029, 5000])
def test_sums_and_gradients(functions: LayerFunctions, columns: int, filled: int, multiplier: float) -> None:
    column = torch.tensor([0, columns - 1, columns // 2, -1, columns // 3])
    weight, of_column = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.0]), torch.tensor([0.25, 1.0, 0.0, 0.0, 4.0])
    for form, bound in FORMATS.items():
        products = products_of(columns, columns + filled, form)
        exact = products[:, :columns].double() * multiplier
        given = products.clone()
        found = functions.softmax_statistics(SplitLogits(given, columns, multiplier), column)
        torch.testing.assert_close(found.maximum.double(), exact.amax(1), rtol=1e-7, atol=0)
        total = (exact - exact.amax(1, keepdim=True)).exp()
        torch.testing.assert_close(found.total.double(), total.sum(1), rtol=2e-6, atol=0)
        there = exact.gather(1, column.clamp_min(0).unsqueeze(1)).squeeze(1)
        there[3] = -math.inf
        torch.testing.assert_close(found.at_column.double(), there, rtol=1e-7, atol=0)

        gradient = found.gradient(weight, of_column)
        assert gradient.data_ptr() == given.data_ptr()
        assert gradient.dtype == form
        assert not gradient[:, columns:].any()
        right = total * weight.unsqueeze(1)
        right[torch.arange(ROWS), column.clamp_min(0)] -= of_column
        right *= multiplier
        for own, row in zip(gradient[:, :columns].double(), right, strict=True):
            assert (own - row).norm() <= bound * row.norm()
        # What is small beside others is there, too, to the same digits.
        small = right[0].abs() > 1e-6 * right[0].norm()
        assert (
            (gradient[0, :columns].double() - right[0])[small].abs() <= 2 * bound * right[0][small].abs()
        ).all()


def losses(
    functions: LayerFunctions, products: Tensor, column: Tensor, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropies and their gradients."""
    found = functions.softmax_statistics(SplitLogits(products.clone(), products.shape[1], multiplier), column)
    loss = found.total.log() + found.maximum - found.at_column
    return loss, found.gradient(1 / found.total, torch.ones(len(products)))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("multiplier", [1.0, 0.37, -0.1])
def test_logits_may_be_huge_or_tiny(functions: LayerFunctions, form: torch.dtype, multiplier: float) -> None:
    for size in (1e-38, 1e-20, 1e4, 1e10, 1e18, 1e37):
        products = products_of(1100, 1100, form, size)
        column = torch.tensor([0, 1099, 0, 1, 1050])
        loss, gradient = losses(functions, products, column, multiplier)
        leaf = products.double().requires_grad_()
        # By the multiplier as it is in fp32, of which this is the scale.
        exact = functional.cross_entropy(leaf * torch.tensor(multiplier).double(), column, reduction="none")
        torch.testing.assert_close(loss, exact.detach().float(), rtol=1e-6, atol=1e-6)
        (right,) = torch.autograd.grad(exact.sum(), leaf)
        assert (gradient.double() - right).norm() <= FORMATS[form] * right.norm()


@pytest.mark.parametrize("form", FORMATS)
def test_a_logit_of_minus_infinity_is_never_predicted(functions: LayerFunctions, form: torch.dtype) -> None:
    products = products_of(1100, 1100, form)
    products[:, :1030] = -math.inf
    loss, gradient = losses(functions, products, torch.full((ROWS,), 1050))
    assert not gradient[:, :1030].any()
    exact = functional.cross_entropy(products[:, 1030:].double(), torch.full((ROWS,), 20), reduction="none")
    torch.testing.assert_close(loss, exact.float(), rtol=1e-6, atol=1e-6)
    products[3, :] = -math.inf
    loss, gradient = losses(functions, products, torch.full((ROWS,), 1050))
    assert loss.isnan().tolist() == [False, False, False, True, False]
    assert not gradient[3].isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_not_finite_stays_so(functions: LayerFunctions, form: torch.dtype) -> None:
    for bad in (math.nan, math.inf):
        for place in (0, 17, 1023, 1024, 1099):
            products = products_of(1100, 1100, form)
            products[2, place] = bad
            loss, gradient = losses(functions, products, torch.arange(ROWS))
            assert loss.isfinite().tolist() == [True, True, False, True, True]
            assert not gradient[2].isfinite().any()
            assert gradient[[0, 1, 3, 4]].isfinite().all()


def test_a_rank_may_hold_what_is_filled_up_alone(functions: LayerFunctions) -> None:
    for form in FORMATS:
        found = functions.softmax_statistics(
            SplitLogits(torch.full((2, 20), math.nan, dtype=form), 0), torch.tensor([-1, -1])
        )
        assert found.maximum.tolist() == [torch.finfo(torch.float32).min] * 2
        assert found.total.tolist() == [0, 0]
        assert found.at_column.tolist() == [-math.inf] * 2
        assert not found.gradient(torch.zeros(2), torch.zeros(2)).any()
