"""Products of a few rows by a compiled function beside the library's of many: the same bits.

Tests of parallel/kernels/small_batch.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.host.c_libraries import open_library
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.matmul_kernels import LIBRARY, MatmulKernel
from hpctrain.parallel.kernels.small_batch import MAX_ROWS, SmallBatchKernel, few_rows, find_block_size


@pytest.fixture(scope="module")
def compiled() -> CompiledFunctions:
    return CompiledFunctions(open_library(compile_functions()))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Blocks(MatmulKernel):
    """Multiplies in fp64 what is added by blocks, of three or more rows."""

    def __init__(self, block: int) -> None:
        self.block = block

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found: Tensor | None = bias
        for left, right in zip(inputs.split(self.block, -1), weight.split(self.block, -1), strict=True):
            part = torch.zeros(*inputs.shape[:-1], len(weight))
            for feature in range(left.shape[-1]):
                # Exact, and rounded once: a multiply-add.
                part = (
                    part.double() + left[..., feature, None].double() * right[:, feature].double()
                ).float()
            found = part if found is None else found + part
        assert found is not None
        return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", [8, 24, 40, 100])
def test_sums_are_of_blocks(compiled: CompiledFunctions, block: int) -> None:
    for rows in (1, 2, 7, 8, 9, 16, 17, 31, 33, MAX_ROWS):
        for outputs in (12, 13, 24, 31):
            x, weight, bias = random(rows, 100), random(outputs, 100, seed=1), random(outputs, seed=2)
            for added in (None, bias):
                # Sums in fp64 are rounded twice: of some the last bit differs.
                found = few_rows(compiled, x, weight, added, block)
                expected = Blocks(block).forward(x, weight, added)
                assert (found == expected).float().mean() > 0.95
                assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(1536, 512), (61, 40), (200, 1000), (77, 203)])
@pytest.mark.parametrize("head", [False, True])
def test_bits_are_those_of_many_rows(compiled: CompiledFunctions, shape: tuple[int, int], head: bool) -> None:
    block = find_block_size(LIBRARY, compiled, *shape, head)
    if block is None:
        pytest.skip(f"the library here adds {shape} in another order")
    by = SmallBatchKernel(LIBRARY, compiled, block)
    weight, rows, bias = random(*shape), random(700, shape[1], seed=1), random(shape[0], seed=2)
    multiply = by.logits if head else by.forward
    whole = multiply(rows, weight)
    assert torch.equal(whole, LIBRARY.logits(rows, weight) if head else LIBRARY.forward(rows, weight))
    for count in (1, 2, 3, 5, 8, 9, 16, 17, 32, 40, MAX_ROWS, MAX_ROWS + 1):
        assert torch.equal(multiply(rows[:count], weight), whole[:count])
    apart = torch.stack((rows[:9], rows[9:18]), 1).reshape(9, 2, -1)[:, 1]
    assert torch.equal(multiply(apart, weight), whole[9:18])
    if not head:
        assert torch.equal(by.forward(rows[:6], weight, bias), LIBRARY.forward(rows, weight, bias)[:6])
        assert torch.equal(by.forward(rows[:6].view(3, 2, -1), weight), whole[:6].view(3, 2, -1))


def test_a_kernel_of_another_order_is_left_alone(compiled: CompiledFunctions) -> None:
    class Backwards(MatmulKernel):
        def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return LIBRARY.forward(inputs.flip(-1), weight.flip(-1), bias)

    assert find_block_size(Backwards(), compiled, 60, 300, False) is None


def test_another_bias_is_seen(compiled: CompiledFunctions) -> None:
    class Last(MatmulKernel):
        def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            product = LIBRARY.forward(inputs, weight)
            return product if bias is None else product + bias

    if find_block_size(LIBRARY, compiled, 60, 1000, False) is None:
        pytest.skip("the library here adds in another order")
    assert find_block_size(Last(), compiled, 60, 1000, False) is None


def test_others_are_the_kernels(compiled: CompiledFunctions) -> None:
    class Counted(MatmulKernel):
        count = 0

        def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            self.count += 1
            return super().forward(inputs, weight, bias)

    counted = Counted()
    by = SmallBatchKernel(counted, compiled, 40)
    x, weight = random(2, 40), random(60, 40)
    by.forward(x, weight)
    assert counted.count == 0
    by.forward(x.bfloat16(), weight.bfloat16())
    by.forward(random(MAX_ROWS + 1, 40), weight)
    by.forward(random(0, 40), weight)
    by.forward(x[:, :20], weight[:, :20])
    by.forward(x, weight[:11])
    assert counted.count == 5
    gradient = random(2, 60, seed=3)
    assert torch.equal(by.input_gradient(gradient, weight), LIBRARY.input_gradient(gradient, weight))
