"""Freivalds' test of matrix products: whoever has X, W and Y can tell, for O(n^2), whether Y is X W^T.

With a vector r of random signs, Y r is X (W^T r) but for rounding, row by row: what changes one element of Y
changes one number of Y r by as much, whatever r is, and what changes several escapes by chance alone. So with
the gradient of the input. The gradient of a weight is a sum of products over a step: what G s has to be, the
sum of all dY^T (X s), is carried along, and compared when no more is added, with all that happened meanwhile.
What rounding may do follows from the operands, row by row (`judge` in `audit_passes.py`): neither rows of
zeros nor outliers do any harm to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.parallel.kernels.matmul_kernels import MatmulKernel
from hpctrain.parallel.product_audit.audit_kernels import AuditKernels, Checksums, ErrorBounds
from hpctrain.parallel.random import key_of, signs
from hpctrain.parallel.shards import Parameter

INPUT_GRADIENT = "gradient of the input"


@dataclass
class Sum:
    """Of a gradient G [n, k], of weights that lie behind each other, what G s has to be [n]; the sums of
    squares of what is added to each row [n]; how much that is, how often, and to what it is rounded before,
    if it is.
    """

    weights: Sequence[Parameter]
    buffer: Tensor
    expected: Tensor
    squares: Tensor
    depth: int = 0
    times: int = 0
    rounded: torch.dtype | None = None


class Where(NamedTuple):
    """What was looked at: of which weights, in which phase, and what it is of them."""

    names: tuple[str, ...]
    phase: str
    what: str


class MatmulAudit:
    """Checks the products of training steps on a rank of the world, in the `phase` that its ledger tells.

    It does so between `begin` and `settle`, before which nothing waits for the device, and changes no bit of
    what is computed. `seed` is that of the signs.
    """

    def __init__(
        self, seed: int, rank: int, phase: Callable[[], str], passes: AuditKernels | None = None
    ) -> None:
        self._seed, self._rank, self._phase = seed, rank, phase
        self._passes = AuditKernels() if passes is None else passes
        self.active = False
        self._step = 0
        self._signs: Tensor | None = None
        self._checksums: dict[object, Checksums] = {}
        self._sums: dict[object, Sum] = {}
        self._worst: dict[Where, Tensor] = {}

    def begin(self, step: int) -> None:
        """A training step begins, of this number, in which weights stay what they are."""
        self._forget()
        self._step, self.active = step, True

    def collect_faults(self) -> list[DetectedFault]:
        """What was wrong in the step, which is over. Waits for the device."""
        found = list(self._worst)
        worst = torch.stack(list(self._worst.values())).tolist() if found else []
        self._forget()
        return [
            DetectedFault("product", where.names[0], where.phase, (self._rank,), _words(where, ratio))
            for where, ratio in zip(found, worst, strict=True)
            if ratio > 1
        ]

    def _forget(self) -> None:
        self.active, self._signs = False, None
        for each in (self._checksums, self._sums, self._worst):
            each.clear()

    @torch.no_grad()
    def product(
        self,
        weights: Sequence[Parameter],
        key: object,
        inputs: Tensor,
        matrix: Tensor,
        output: Tensor,
        bias: Tensor | None = None,
        turned: bool = False,
        what: str | None = None,
    ) -> None:
        """`output` [..., n] is computed: inputs [..., k] times `matrix` [n, k] transposed, with a `bias` [n];
        or `turned`, [..., k] of inputs [..., n] times the matrix. By its `key` a matrix is known in a step.
        `what` is the name of the output.
        """
        left, right = _rows(inputs), _rows(output)
        if not left.numel() or not right.numel():
            return
        known = self._checksums.get(key)
        if known is None:
            along, across = (self._signs_of(size, matrix) for size in (matrix.shape[1], len(matrix)))
            known = self._checksums[key] = self._passes.checksums(matrix, along, across)
        vector, squares = known.of_columns, known.column_squares
        if turned:
            vector, squares = known.of_rows, known.row_squares
        expected, added = self._passes.rows(left, vector, squares)
        of_signs = self._signs_of(right.shape[1], matrix)
        there, own = self._passes.rows(right, of_signs)
        if bias is not None:
            of_bias, square = self._passes.rows(bias.unsqueeze(0), of_signs)
            expected, added = expected + of_bias, added + square
        bounds = ErrorBounds(
            left.shape[1] + (bias is not None), right.shape[1], output.dtype, _in_16_bits(output.dtype)
        )
        what = what or (INPUT_GRADIENT if turned else "product")
        self._passes.judge(bounds, expected, there, added, own, self._worst_of(weights, what, there))

    def knows(self, key: object) -> bool:
        """Whether a matrix was there in the step by now: it is not looked at again."""
        return key in self._checksums

    @torch.no_grad()
    def adding(
        self,
        weights: Sequence[Parameter],
        key: object,
        output_gradient: Tensor,
        inputs: Tensor,
        into: Tensor,
        first: bool,
        rounded: torch.dtype | None = None,
    ) -> None:
        """What is added next to `into` [n, k] is output_gradient [m, n]^T inputs [m, k], to what was there
        unless it is the `first`. It may be `rounded` before.
        """
        entry = self._sum(weights, key, into, first)
        if len(inputs):
            along, squares = self._passes.rows(inputs, self._signs_of(inputs.shape[1], into))
            self._passes.add_columns(output_gradient, along, squares, entry.expected, entry.squares)
        entry.depth += len(inputs)
        entry.times += 1
        entry.rounded = rounded or entry.rounded

    def grouped_product(
        self,
        weight: Parameter,
        inputs: Tensor,
        matrices: Tensor,
        output: Tensor,
        segments: Iterable[tuple[int, slice]],
        turned: bool,
    ) -> None:
        """As `product`, of those rows of each one of `matrices` [e, n, k] that segments tell. Waits for the
        device where they are there.
        """
        for expert, rows in segments:
            key = weight, expert
            self.product([weight], key, inputs[rows], matrices[expert], output[rows], turned=turned)

    def adding_grouped(
        self,
        weight: Parameter,
        output_gradient: Tensor,
        inputs: Tensor,
        into: Tensor,
        segments: Iterable[tuple[int, slice]],
        first: bool,
    ) -> None:
        """As `adding`, to `into` [e, n, k], of those rows of each expert that segments tell."""
        rounded = inputs.dtype if inputs.is_cpu and inputs.dtype != into.dtype else _in_16_bits(inputs.dtype)
        if first:
            for expert in range(len(into)):
                self._sum([weight], (weight, expert), into[expert], first)
        for expert, rows in segments:
            key = weight, expert
            self.adding([weight], key, output_gradient[rows], inputs[rows], into[expert], first, rounded)

    def added(self, key: object) -> None:
        """That is done. Where others add, too, it is looked at by itself."""
        if _is_mixed(self._sums[key].weights):
            self._compare(self._sums.pop(key))

    @torch.no_grad()
    def expect_lookup(self, table: Parameter, into: Tensor, indices: Tensor, rows: Tensor) -> None:
        """What is added next to rows `indices` [m] of the gradient of a table are `rows` [m, k]."""
        if table.uses == 1 or _is_mixed([table]):
            return
        entry = self._sum([table], table, into, first=False)
        along, squares = self._passes.rows(rows, self._signs_of(rows.shape[1], rows))
        entry.expected.index_add_(0, indices, along)
        entry.squares.index_add_(0, indices, squares)
        entry.depth += len(rows)
        entry.times += len(rows)

    def compare(self, parameters: Iterable[Parameter]) -> None:
        """All is added to the gradients of these, and nothing else has happened to them."""
        final = set(parameters)
        for key in [key for key, each in self._sums.items() if each.weights[0] in final]:
            self._compare(self._sums.pop(key))

    def _sum(self, weights: Sequence[Parameter], key: object, into: Tensor, first: bool) -> Sum:
        """That of this key, which begins where there is none, with what is there where others add, too."""
        entry = self._sums.get(key)
        if entry is None or first:
            expected, squares = torch.zeros(2, len(into), device=into.device)
            entry = self._sums[key] = Sum(weights, into, expected, squares)
            if not first and _is_mixed(weights):
                entry.expected, entry.squares = self._along(into)
                entry.depth = 1
        return entry

    @torch.no_grad()
    def _compare(self, entry: Sum) -> None:
        into, weights = entry.buffer, entry.weights
        rounded, times = entry.rounded, 1  # what is added is rounded, each by itself
        if _in_16_bits(into.dtype):
            rounded, times = into.dtype, entry.times  # the sum is, again and again
        bounds = ErrorBounds(entry.depth, into.shape[1], into.dtype, rounded, times, alike=True)
        sizes = [len(into)] if len(weights) == 1 else [weight.shard.local[0] for weight in weights]
        there, own = self._along(into)
        rows = (each.split(sizes) for each in (entry.expected, there, entry.squares, own))
        for weight, expected, found, added, squares in zip(weights, *rows, strict=True):
            worst = self._worst_of([weight], "gradient", found)
            self._passes.judge(bounds, expected, found, added, squares, worst)

    def _along(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Of a matrix [m, k] its product [m] with signs, and sums of its squares."""
        return self._passes.rows(matrix, self._signs_of(matrix.shape[1], matrix))

    def _signs_of(self, count: int, like: Tensor) -> Tensor:
        """The step's first so many signs."""
        if self._signs is None or len(self._signs) < count:
            made = torch.from_numpy(signs(key_of(self._seed, f"audit {self._step}"), count))
            self._signs = made.to(like.device)
        return self._signs[:count]

    def _worst_of(self, weights: Sequence[Parameter], what: str, like: Tensor) -> Tensor:
        """The worst that was found there so far."""
        where = Where(tuple(weight.shard.name for weight in weights), self._phase(), what)
        if where not in self._worst:
            self._worst[where] = like.new_zeros(())
        return self._worst[where]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _in_16_bits(dtype: torch.dtype) -> torch.dtype | None:
    """The format, if it is of so many: what is added up in more is rounded to it."""
    return dtype if dtype.itemsize == 2 else None


def _is_mixed(weights: Sequence[Parameter]) -> bool:
    """Whether others may add to their gradients without a word, as a module of a user's does."""
    return any(type(weight) is not Parameter for weight in weights)


def _words(where: Where, ratio: float) -> str:
    """What was found, for people."""
    beside = f" (computed with {', '.join(where.names[1:])})" if where.names[1:] else ""
    size = "is not finite" if ratio == float("inf") else f"differs by {ratio:.3g} times the rounding bound"
    return f"{where.what}{beside} {size}"


class WatchedKernel(MatmulKernel):
    """What another kernel computes of the weights of a Product, looked at by an audit."""

    def __init__(self, by: MatmulKernel, audit: MatmulAudit, weights: Sequence[Parameter]) -> None:
        self._by, self._audit, self._weights = by, audit, weights
        self.name, self.converts = by.name, by.converts

    @override
    def multiplies(self, storage: torch.dtype) -> bool:
        return self._by.multiplies(storage)

    @override
    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = self._by.forward(inputs, weight, bias)
        self._audit.product(self._weights, self._weights[0], inputs, weight, output, bias)
        return output

    @override
    def logits(self, inputs: Tensor, table: Tensor) -> Tensor:
        output = self._by.logits(inputs, table)
        self._audit.product(self._weights, self._weights[0], inputs, table, output)
        return output

    @override
    def input_gradient(self, output_gradient: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        made = self._by.input_gradient(output_gradient, weight, out)
        self._audit.product(self._weights, self._weights[0], output_gradient, weight, made, turned=True)
        return made

    @override
    def add_weight_gradient(self, into: Tensor, output_gradient: Tensor, inputs: Tensor, first: bool) -> None:
        apart = inputs.is_cpu and not self.converts and inputs.dtype != into.dtype
        rounded, key = inputs.dtype if apart else None, self._weights[0]
        self._audit.adding(self._weights, key, output_gradient, inputs, into, first, rounded)
        self._by.add_weight_gradient(into, output_gradient, inputs, first)
        self._audit.added(key)
