"""Check of matrix products by random projections (Freivalds' test).

The equation Y = X W^T of n x n matrices can be checked in O(n^2). With a vector r of random signs, Y r equals
X (W^T r) up to rounding, row by row. An error in one element of Y changes one element of Y r by the same
amount, whatever r is; several errors in a row escape only by chance. The gradient of the input is checked
the same way.

The gradient of a weight is a sum of products over a step, G = sum of dY^T X. For signs s the audit adds up
dY^T (X s), and compares it with G s after the last addition. So it also finds what changed G in between.

The errors that rounding may cause follow from the operands, row by row (`AuditKernels.judge`): neither rows
of zeros nor outliers affect the check of other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.fault_checks.audit_kernels import AuditKernels, Checksums, ErrorBounds
from hpctrain.parallel.fp8.quantize import QuantizedTensor
from hpctrain.parallel.kernels.matmul_kernels import MatmulKernel
from hpctrain.parallel.product_check import ProductCheck, RowsOfExperts
from hpctrain.parallel.random import key_of, signs
from hpctrain.parallel.shards import Parameter

INPUT_GRADIENT = "gradient of the input"


class AuditTarget(NamedTuple):
    """Weights that a product multiplies or whose gradient it adds to.

    Attributes:
        weights: Fused weights.
        key: What identifies the matrix within a step.
    """

    weights: Sequence[Parameter]
    key: object


@dataclass
class GradientSum:
    """Expected sum of the products that are added to a gradient G [n, k].

    Attributes:
        weights: Fused weights.
        buffer: The gradient.
        expected: Expected G s, [n].
        squares: Sums of squares of what is added to each row, [n].
        depth: Number of products that each element is the sum of.
        times: Number of additions.
        rounding_dtype: Format to which each product is rounded before it is added; None if it is not.
    """

    weights: Sequence[Parameter]
    buffer: Tensor
    expected: Tensor
    squares: Tensor
    depth: int = 0
    times: int = 0
    rounding_dtype: torch.dtype | None = None


class AuditedResult(NamedTuple):
    """Identity of a checked result.

    Attributes:
        names: Names of the weights that it was computed with.
        phase: Phase of the step in which it was computed.
        what: Kind of result, such as "product" or "gradient".
    """

    names: tuple[str, ...]
    phase: str
    what: str


class MatmulAudit(ProductCheck):
    """Check of the products of training steps on one rank.

    It checks between `begin_step` and `collect_faults`, does not wait for the device in between, and changes
    no bit of what is computed.

    Args:
        seed: Seed of the signs.
        rank: Rank in the world.
        phase: Returns the current phase of the step.
        kernels: Kernels that compute projections; torch's by default.

    Attributes:
        active: True within a step that is checked.
    """

    def __init__(
        self, seed: int, rank: int, phase: Callable[[], str], kernels: AuditKernels | None = None
    ) -> None:
        self._seed, self._rank, self._phase = seed, rank, phase
        self._kernels = AuditKernels() if kernels is None else kernels
        self.active = False
        self._step = 0
        self._signs: Tensor | None = None
        self._checksums: dict[object, Checksums] = {}
        self._sums: dict[object, GradientSum] = {}
        self._worst: dict[AuditedResult, Tensor] = {}

    @override
    def begin_step(self, step: int) -> None:
        self._reset()
        self._step, self.active = step, True

    @override
    def collect_faults(self) -> list[DetectedFault]:
        results = list(self._worst)
        worst = torch.stack(list(self._worst.values())).tolist() if results else []
        self._reset()
        return [
            DetectedFault("product", result.names[0], result.phase, (self._rank,), _describe(result, ratio))
            for result, ratio in zip(results, worst, strict=True)
            if ratio > 1
        ]

    def _reset(self) -> None:
        self.active, self._signs = False, None
        for each in (self._checksums, self._sums, self._worst):
            each.clear()

    @override
    def checked_kernel(self, kernel: MatmulKernel, weights: Sequence[Parameter]) -> MatmulKernel:
        return AuditedKernel(kernel, self, weights)

    @torch.no_grad()
    def check_product(
        self,
        target: AuditTarget,
        inputs: Tensor,
        matrix: Tensor,
        output: Tensor,
        bias: Tensor | None = None,
        transposed: bool = False,
        what: str | None = None,
    ) -> None:
        """Check a computed product.

        Args:
            target: Weights and key of the matrix.
            inputs: Left operand [..., k], or [..., n] if `transposed`.
            matrix: Right operand [n, k].
            output: Inputs times the matrix transposed, [..., n]; if `transposed`, times the matrix, [..., k].
            bias: Bias [n] in the output, or None.
            transposed: True for the gradient of the input.
            what: Name of the output for faults.
        """
        left, right = _rows(inputs), _rows(output)
        if not left.numel() or not right.numel():
            return
        checksums = self._checksums.get(target.key)
        if checksums is None:
            along, across = (self._signs_of(size, matrix) for size in (matrix.shape[1], len(matrix)))
            checksums = self._checksums[target.key] = self._kernels.checksums(matrix, along, across)
        vector, squares = checksums.of_columns, checksums.column_squares
        if transposed:
            vector, squares = checksums.of_rows, checksums.row_squares
        expected, added = self._kernels.rows(left, vector, squares)
        output_signs = self._signs_of(right.shape[1], matrix)
        actual, output_squares = self._kernels.rows(right, output_signs)
        if bias is not None:
            of_bias, square = self._kernels.rows(bias.unsqueeze(0), output_signs)
            expected, added = expected + of_bias, added + square
        depth = left.shape[1] + (bias is not None)
        bounds = ErrorBounds(depth, right.shape[1], output.dtype, _if_16_bits(output.dtype))
        what = what or (INPUT_GRADIENT if transposed else "product")
        worst = self._worst_of(target.weights, what, actual)
        self._kernels.judge(bounds, expected, actual, added, output_squares, worst)

    @override
    def check_quantized_product(
        self,
        weights: Sequence[Parameter],
        operands: tuple[QuantizedTensor, QuantizedTensor],
        output: Tensor,
        transposed: bool,
    ) -> None:
        (left, right), what = operands, INPUT_GRADIENT if transposed else "product"
        target = AuditTarget(weights, (weights[0], what))
        # The checksums of a matrix that was used before in this step are known, so its values are not needed.
        matrix = right.values if target.key in self._checksums else right.dequantized()
        self.check_product(target, left.dequantized(), matrix, output, what=what)

    @torch.no_grad()
    def expect_addition(
        self,
        target: AuditTarget,
        output_gradient: Tensor,
        inputs: Tensor,
        into: Tensor,
        overwrite: bool,
        rounding_dtype: torch.dtype | None = None,
    ) -> None:
        """Record that a product will be added to a gradient next.

        Args:
            target: Weights and key of the gradient.
            output_gradient: Gradient of the output [m, n].
            inputs: Input of the layer [m, k].
            into: Gradient [n, k] to which output_gradient^T inputs will be added.
            overwrite: True if the product will replace the gradient instead.
            rounding_dtype: Format to which the product is rounded before it is added; None if it is not.
        """
        entry = self._sum(target, into, overwrite)
        if len(inputs):
            along, squares = self._kernels.rows(inputs, self._signs_of(inputs.shape[1], into))
            self._kernels.add_columns(output_gradient, along, squares, entry.expected, entry.squares)
        entry.depth += len(inputs)
        entry.times += 1
        entry.rounding_dtype = rounding_dtype or entry.rounding_dtype

    @override
    def expect_quantized_addition(
        self,
        weights: Sequence[Parameter],
        operands: tuple[QuantizedTensor, QuantizedTensor],
        into: Tensor,
        overwrite: bool,
    ) -> None:
        # GPUs accumulate 8-bit products with little more than 16 bits.
        rounding_dtype = None if into.is_cpu else torch.bfloat16
        left, right = (operand.dequantized() for operand in operands)
        self.expect_addition(AuditTarget(weights, weights[0]), left, right, into, overwrite, rounding_dtype)

    @override
    def finish_addition(self, weights: Sequence[Parameter]) -> None:
        if _is_shared(weights):  # the user's module may add to the gradient later, so it is checked now
            self._compare(self._sums.pop(weights[0]))

    @override
    def check_grouped_product(
        self,
        weight: Parameter,
        operands: tuple[Tensor, Tensor, Tensor],
        segments: RowsOfExperts,
        transposed: bool,
    ) -> None:
        inputs, matrices, output = operands
        for expert, rows in segments:
            target = AuditTarget([weight], (weight, expert))
            self.check_product(target, inputs[rows], matrices[expert], output[rows], transposed=transposed)

    @override
    def expect_grouped_addition(
        self,
        weight: Parameter,
        operands: tuple[Tensor, Tensor],
        into: Tensor,
        segments: RowsOfExperts,
        overwrite: bool,
    ) -> None:
        output_gradient, inputs = operands
        rounded = inputs.dtype if inputs.is_cpu and inputs.dtype != into.dtype else _if_16_bits(inputs.dtype)
        if overwrite:
            for expert in range(len(into)):
                self._sum(AuditTarget([weight], (weight, expert)), into[expert], overwrite)
        for expert, rows in segments:
            target = AuditTarget([weight], (weight, expert))
            self.expect_addition(
                target, output_gradient[rows], inputs[rows], into[expert], overwrite, rounded
            )

    @override
    @torch.no_grad()
    def expect_lookup(self, table: Parameter, into: Tensor, indices: Tensor, rows: Tensor) -> None:
        if table.uses == 1 or _is_shared([table]):
            return
        entry = self._sum(AuditTarget([table], table), into, overwrite=False)
        along, squares = self._kernels.rows(rows, self._signs_of(rows.shape[1], rows))
        entry.expected.index_add_(0, indices, along)
        entry.squares.index_add_(0, indices, squares)
        entry.depth += len(rows)
        entry.times += len(rows)

    @override
    def check_gradients(self, parameters: Iterable[Parameter]) -> None:
        complete = set(parameters)
        for key in [key for key, each in self._sums.items() if each.weights[0] in complete]:
            self._compare(self._sums.pop(key))

    def _sum(self, target: AuditTarget, into: Tensor, overwrite: bool) -> GradientSum:
        """Return the expected sum of a gradient. A new one starts with what the user's module has added."""
        entry = self._sums.get(target.key)
        if entry is None or overwrite:
            expected, squares = torch.zeros(2, len(into), device=into.device)
            entry = self._sums[target.key] = GradientSum(target.weights, into, expected, squares)
            if not overwrite and _is_shared(target.weights):
                entry.expected, entry.squares = self._project(into)
                entry.depth = 1
        return entry

    @torch.no_grad()
    def _compare(self, entry: GradientSum) -> None:
        into, weights = entry.buffer, entry.weights
        rounding_dtype, roundings = entry.rounding_dtype, 1  # each product is rounded separately
        if _if_16_bits(into.dtype):
            rounding_dtype, roundings = into.dtype, entry.times  # each addition rounds the sum
        bounds = ErrorBounds(entry.depth, into.shape[1], into.dtype, rounding_dtype, roundings, uniform=True)
        sizes = [len(into)] if len(weights) == 1 else [weight.shard.local[0] for weight in weights]
        rows = (each.split(sizes) for each in (entry.expected, entry.squares, *self._project(into)))
        for weight, expected, added, actual, squares in zip(weights, *rows, strict=True):
            worst = self._worst_of([weight], "gradient", actual)
            self._kernels.judge(bounds, expected, actual, added, squares, worst)

    def _project(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product [m] of a matrix [m, k] with signs, and the sums of squares of its rows."""
        return self._kernels.rows(matrix, self._signs_of(matrix.shape[1], matrix))

    def _signs_of(self, count: int, like: Tensor) -> Tensor:
        """Return the first `count` signs of the step."""
        if self._signs is None or len(self._signs) < count:
            new_signs = torch.from_numpy(signs(key_of(self._seed, f"audit {self._step}"), count))
            self._signs = new_signs.to(like.device)
        return self._signs[:count]

    def _worst_of(self, weights: Sequence[Parameter], what: str, like: Tensor) -> Tensor:
        """Return the largest error of a result in this step so far, in units of its bound."""
        result = AuditedResult(tuple(weight.shard.name for weight in weights), self._phase(), what)
        if result not in self._worst:
            self._worst[result] = like.new_zeros(())
        return self._worst[result]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _if_16_bits(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype if it has 16 bits, so that sums in fp32 are rounded to it; else None."""
    return dtype if dtype.itemsize == 2 else None


def _is_shared(weights: Sequence[Parameter]) -> bool:
    """Return True if a user's module may add to the gradients without a report."""
    return any(type(weight) is not Parameter for weight in weights)


def _describe(result: AuditedResult, ratio: float) -> str:
    """Return the text of a fault."""
    others = f" (computed with {', '.join(result.names[1:])})" if result.names[1:] else ""
    size = "is not finite" if ratio == float("inf") else f"differs by {ratio:.3g} times the rounding bound"
    return f"{result.what}{others} {size}"


class AuditedKernel(MatmulKernel):
    """Kernel whose results an audit checks.

    Args:
        kernel: Kernel that computes.
        audit: The audit.
        weights: Weights that it multiplies.
    """

    def __init__(self, kernel: MatmulKernel, audit: MatmulAudit, weights: Sequence[Parameter]) -> None:
        self._kernel, self._audit, self._target = kernel, audit, AuditTarget(weights, weights[0])
        self.name, self.converts = kernel.name, kernel.converts

    @override
    def is_available(self, storage: torch.dtype) -> bool:
        return self._kernel.is_available(storage)

    @override
    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = self._kernel.forward(inputs, weight, bias)
        self._audit.check_product(self._target, inputs, weight, output, bias)
        return output

    @override
    def logits(self, inputs: Tensor, table: Tensor) -> Tensor:
        output = self._kernel.logits(inputs, table)
        self._audit.check_product(self._target, inputs, table, output)
        return output

    @override
    def input_gradient(self, output_gradient: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        result = self._kernel.input_gradient(output_gradient, weight, out)
        self._audit.check_product(self._target, output_gradient, weight, result, transposed=True)
        return result

    @override
    def add_weight_gradient(
        self, into: Tensor, output_gradient: Tensor, inputs: Tensor, overwrite: bool
    ) -> None:
        is_rounded = inputs.is_cpu and not self.converts and inputs.dtype != into.dtype
        rounding_dtype = inputs.dtype if is_rounded else None
        self._audit.expect_addition(self._target, output_gradient, inputs, into, overwrite, rounding_dtype)
        self._kernel.add_weight_gradient(into, output_gradient, inputs, overwrite)
        self._audit.finish_addition(self._target.weights)
