"""Products of a few rows, as in generation, with the bits of products of many rows.

Libraries copy operands into a layout for many rows. For a few rows this takes longer than the product, and
one, two or three rows are often added in another order. A function of `functions.c` reads the matrix in
place. Each element is a sum of blocks of features, within which products are added one after the other. The
size of the blocks that a library uses on a processor is found by trying.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.function_library import few_rows_floats
from hpctrain.parallel.kernels.matmul_kernels import MatmulKernel

MAX_ROWS = 48
"""Rows up to which it takes less time than libraries do."""

LEAST_OUTPUTS = 12
"""Smallest number of outputs, as in functions.c."""

_STEP = 8
"""Sizes of blocks that are tried are multiples of this."""

_MOST_OUTPUTS = 8192
"""Most outputs of a matrix that is tried; a larger table is multiplied in parts."""


class SmallBatchKernel(MatmulKernel):
    """Kernel for outputs and logits of a few rows in fp32, which leaves those of more rows to another kernel.

    Args:
        inner: The other kernel.
        functions: Compiled functions.
        block: Features that are added one after the other.
    """

    def __init__(self, inner: MatmulKernel, functions: CompiledFunctions, block: int) -> None:
        self.inner, self.functions, self.block = inner, functions, block
        self.name, self.converts = inner.name, inner.converts

    @override
    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if _is_for_library(inputs, weight):
            return self.inner.forward(inputs, weight, bias)
        return few_rows(self.functions, inputs, weight, bias, self.block)

    @override
    def logits(self, inputs: Tensor, table: Tensor) -> Tensor:
        if _is_for_library(inputs, table):
            return self.inner.logits(inputs, table)
        return few_rows(self.functions, inputs, table, None, self.block)


def _is_for_library(inputs: Tensor, weight: Tensor) -> bool:
    """Return True if there are too many rows, or too few outputs, for the compiled function."""
    fitting = inputs.dtype == weight.dtype == torch.float32 and weight.is_contiguous()
    return not (
        fitting and len(weight) >= LEAST_OUTPUTS and 0 < inputs.numel() <= MAX_ROWS * inputs.shape[-1]
    )


def few_rows(
    functions: CompiledFunctions, inputs: Tensor, weight: Tensor, bias: Tensor | None, block: int
) -> Tensor:
    """Return inputs [..., k] times weight [n, k] transposed, with a bias [n] added, in fp32.

    Args:
        functions: Compiled functions.
        inputs: Left operand.
        weight: Right operand, of at least LEAST_OUTPUTS rows.
        bias: Bias, or None.
        block: Features that are added one after the other.
    """
    inputs = inputs.contiguous()
    outputs, features = weight.shape
    rows = inputs.numel() // features
    result = inputs.new_empty(*inputs.shape[:-1], outputs)
    memory = torch.empty(few_rows_floats(rows, features))
    functions.library.few_rows(inputs, weight, bias, result, memory, rows, outputs, features, block)
    return result


def find_block_size(
    kernel: MatmulKernel, functions: CompiledFunctions, outputs: int, inputs: int, head: bool
) -> int | None:
    """Return the `block` with which `few_rows` has the bits of a kernel's products of many rows, in fp32.

    Args:
        kernel: The kernel.
        functions: Compiled functions.
        outputs: Outputs of the matrix.
        inputs: Inputs of the matrix.
        head: True for a table that `MatmulKernel.logits` multiplies.

    Returns:
        The number of features that are added one after the other, or None if no number has these bits.
    """
    if outputs < LEAST_OUTPUTS:
        return None
    generator, corner = torch.Generator().manual_seed(0), slice(0, LEAST_OUTPUTS)
    outputs = min(outputs, _MOST_OUTPUTS)
    weight, rows = (torch.randn(count, inputs, generator=generator) for count in (outputs, 3 * MAX_ROWS))
    biases = (None,) if head else (None, torch.randn(outputs, generator=generator))
    expected = [
        kernel.logits(rows, weight) if head else kernel.forward(rows, weight, bias) for bias in biases
    ]

    def agrees(block: int) -> bool:
        return all(
            torch.equal(few_rows(functions, rows[:count], weight, bias, block), result[:count])
            for bias, result in zip(biases, expected, strict=True)
            for count in (1, 3, MAX_ROWS)
        )

    for block in (*range(_STEP, inputs, _STEP), inputs):
        # A few rows and columns exclude most block sizes quickly.
        if torch.equal(few_rows(functions, rows[:2], weight[corner], None, block), expected[0][:2, corner]):
            return block if agrees(block) else None
    return None
