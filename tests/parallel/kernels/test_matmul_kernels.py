"""Every kernel's products against those of the same numbers in fp64: shapes, views and formats; the kernel
that is asked for is the one that computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hpctrain.parallel.kernels import matmul_kernels as module
from hpctrain.parallel.kernels.matmul_kernels import (
    KERNELS,
    LIBRARY,
    ONEDNN,
    KernelTable,
    MatmulKernel,
    kernel_named,
)
from hpctrain.parallel.layer_context import ProductSettings
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.shards import Parameter, Shard
from tests.parallel.test_matmul import LAYER_CONTEXT

FORMATS = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
CASES = [(kernel, each) for kernel in KERNELS.values() for each in FORMATS if kernel.is_available(each)]
SHAPES = [(7, 5, 3), (1, 5, 3), (0, 5, 3), (6, 1, 4), (6, 4, 1), (70, 48, 96)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def error(found: Tensor, exact: Tensor) -> float:
    """Of a result, over the largest number of the exact one."""
    assert found.shape == exact.shape
    largest = exact.abs().max().clamp_min(1e-30) if exact.numel() else 1.0
    return float((found.double() - exact).abs().amax() / largest) if exact.numel() else 0.0


def layouts(matrix: Tensor) -> Iterator[Tensor]:
    """A matrix as it lies in memory in several ways."""
    yield matrix
    yield matrix.t().contiguous().t()
    wide = torch.full((len(matrix) + 2, matrix.shape[1] + 3), torch.nan, dtype=matrix.dtype)
    yield wide[1:-1, 2:-1].copy_(matrix)


@pytest.mark.parametrize(("kernel", "storage"), CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_exact_to_rounding(
    kernel: MatmulKernel, storage: torch.dtype, shape: tuple[int, int, int]
) -> None:
    rows, outputs, inputs = shape
    generator = torch.Generator().manual_seed(1)
    sizes = (rows, inputs), (outputs, inputs), (rows, outputs), (outputs,)
    x, w, g, b = (torch.randn(*size, generator=generator).to(storage) for size in sizes)
    x64, w64, g64 = x.double(), w.double(), g.double()
    most = ROUNDING[storage]
    for left, right, of_output in zip(layouts(x), layouts(w), layouts(g), strict=True):
        assert error(kernel.forward(left, right), x64 @ w64.t()) <= most
        assert error(kernel.forward(left, right, b), x64 @ w64.t() + b.double()) <= 2 * most
        assert error(kernel.logits(left, right), x64 @ w64.t()) <= most
        assert error(kernel.input_gradient(of_output, right), g64 @ w64) <= most
        out = torch.full((rows + 2, inputs), torch.nan, dtype=storage)[1:-1]
        assert kernel.input_gradient(of_output, right, out).data_ptr() == out.data_ptr()
        assert error(out, g64 @ w64) <= most
        for gradient in {torch.float32, storage}:
            total = torch.full((outputs, inputs), torch.nan, dtype=gradient)
            kernel.add_weight_gradient(total, of_output, left, overwrite=True)
            assert error(total, g64.t() @ x64) <= most
            kernel.add_weight_gradient(total, of_output, left, overwrite=False)
            assert error(total, 2 * g64.t() @ x64) <= 2 * most
    whole = x.view(rows, 1, inputs).expand(rows, 2, inputs)
    assert error(kernel.forward(whole, w, b)[:, 1], x64 @ w64.t() + b.double()) <= 2 * most
    assert kernel.forward(whole, w).dtype == kernel.input_gradient(g, w).dtype == storage


@pytest.mark.parametrize("name", ["fp32", "fp32-onednn"])
def test_sums_in_fp32_are_of_unrounded_products(name: str) -> None:
    x, g = torch.randn(64, 16).bfloat16(), torch.randn(64, 24).bfloat16()
    exact, errors = 3 * g.double().t() @ x.double(), {}
    for kernel in (LIBRARY, KERNELS[name]):
        total = torch.zeros(24, 16)
        for _ in range(3):
            kernel.add_weight_gradient(total, g, x, overwrite=False)
        errors[kernel.name] = error(total, exact)
    assert errors[name] < 1e-6 < 1e-4 < errors["library"]


@pytest.mark.parametrize("kernel", [ONEDNN, KERNELS["fp32-onednn"], KERNELS["fp32"]])
def test_sums_in_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, kernel: MatmulKernel) -> None:
    storage = torch.float32 if kernel is ONEDNN else torch.bfloat16
    x, g = torch.randn(9, 8).to(storage), torch.randn(9, 20).to(storage)
    monkeypatch.setattr(module, "PRODUCT_ELEMENTS", 7 * 8)
    for gradient in {torch.float32, storage}:
        total = torch.ones(20, 8, dtype=gradient)
        kernel.add_weight_gradient(total, g, x, overwrite=False)
        assert error(total, g.double().t() @ x.double() + 1) <= ROUNDING[gradient]


def test_the_chosen_kernel_computes_the_pass_of_its_matrix() -> None:
    class Noting(MatmulKernel):
        def __init__(self, name: str) -> None:
            self.name = name

        def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            calls.append((self.name, "forward"))
            return super().forward(inputs, weight, bias)

        def add_weight_gradient(
            self, into: Tensor, output_gradient: Tensor, inputs: Tensor, overwrite: bool
        ) -> None:
            calls.append((self.name, "weight"))
            super().add_weight_gradient(into, output_gradient, inputs, overwrite)

    calls: list[tuple[str, str]] = []
    kernels = KernelTable(Noting("other"))
    kernels.chosen["weight_gradient", 10, 3] = Noting("chosen")
    layer_context = replace(LAYER_CONTEXT, products=ProductSettings(kernels))
    for rows in (4, 6):
        parts = [Parameter(Shard.replicated(name, (rows, 3))) for name in ("a", "b")][: 2 if rows == 4 else 1]
        # What lies behind each other is one matrix: 8 rows of two weights, and 6 of one.
        memory, sums = torch.randn(10, 3), torch.zeros(10, 3)
        first = Parameter(Shard.replicated("c", (10 - rows * len(parts), 3)))
        weights = [*parts, first]
        start = 0
        for weight in weights:
            stop = start + weight.shard.shape[0]
            weight.data, weight.gradient = memory[start:stop], sums[start:stop]
            start = stop
        product = Matmul(weights, layer_context)
        assert product.shape == (10, 3)
        x = torch.randn(5, 3)
        torch.testing.assert_close(product.forward(x), x @ memory.t())
        product.add_weight_gradient(product.forward(x), x)
        torch.testing.assert_close(sums, memory @ x.t() @ x)
    assert calls == [("other", "forward"), ("other", "forward"), ("chosen", "weight")] * 2


def test_names_of_decks_are_kernels() -> None:
    assert kernel_named("auto", torch.float32) is LIBRARY
    assert kernel_named("onednn", torch.float32) is ONEDNN
    assert kernel_named("onednn", torch.bfloat16) is LIBRARY
    assert kernel_named("fp32", torch.bfloat16).name == "fp32"
