"""Kernels of the sums by which a MatmulAudit checks matrix products.

They are computed by torch or, on a CPU, by the library that is compiled from `audit.c`. All sums are in fp32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

BOUND_FACTOR = 8.0
"""Ratio of the bound of an error to its expected size (`AuditKernels.judge`).

If the errors of a row are independent, a fraction of 1e-14 of all rows exceeds the bound.
"""

CHUNK_ELEMENTS = 1 << 20
"""Number of elements that torch reads at a time, so that they are in the cache when it reads them again."""

BIAS_THRESHOLD, BIAS_FACTOR = 4.0, 5.0
"""Threshold and factor for results whose partial sums are always rounded in the same direction.

This happens where the terms of a sum are alike, as if all tokens are the same. The elements of such a row
have a norm above BIAS_THRESHOLD times the root of the sum of squares of their terms. The part of the norm
above this threshold counts BIAS_FACTOR times in the bound.
"""

SMALLEST_BOUND = 1e-17
"""Smallest bound, for numbers so small that their square is zero."""


class Checksums(NamedTuple):
    """Projections that represent a matrix W [n, k] within a step.

    Attributes:
        of_rows: W s [n], with signs s [k].
        row_squares: Sums of squares of the rows, [n].
        of_columns: W^T r [k], with signs r [n].
        column_squares: Sums of squares of the columns, [k].
    """

    of_rows: Tensor
    row_squares: Tensor
    of_columns: Tensor
    column_squares: Tensor


@dataclass(frozen=True)
class ErrorBounds:
    """Sizes and formats that determine the rounding errors of the elements of a result.

    Attributes:
        depth: Number of products that each element is the sum of.
        width: Number of elements that are summed with signs.
        dtype: Format of the result.
        rounding_dtype: Format to which the elements are also rounded; None if they are not.
        roundings: Number of these additional roundings.
        uniform: True if all rows are sums of products of the same kind, as in a gradient.
    """

    depth: int
    width: int
    dtype: torch.dtype
    rounding_dtype: torch.dtype | None = None
    roundings: int = 1
    uniform: bool = False

    @property
    def factors(self) -> tuple[float, float]:
        """Ratios of bounds to magnitudes of elements: for accumulation and for additional roundings."""
        unit, additional = torch.finfo(torch.float32).eps / 2, 0.0
        if self.rounding_dtype is not None:
            additional = torch.finfo(self.rounding_dtype).eps / 2 * math.sqrt(self.roundings)
        return BOUND_FACTOR * unit * math.sqrt((self.depth + self.width) / 6), BOUND_FACTOR * additional

    @property
    def least(self) -> float:
        """Smallest bound: numbers near the smallest one of a format are rounded to multiples of it."""
        if self.rounding_dtype is None:
            return SMALLEST_BOUND
        form = torch.finfo(self.rounding_dtype)
        multiple: float = form.smallest_normal * form.eps
        return SMALLEST_BOUND + BOUND_FACTOR * math.sqrt(self.width * self.roundings) * multiple

    @property
    def largest(self) -> float:
        """Largest magnitude that is certainly finite in the formats."""
        return torch.finfo(self.dtype if self.rounding_dtype is None else self.rounding_dtype).max / 2


class AuditKernels:
    """Sums over the elements of matrices that an audit needs, by torch. Each method reads a matrix once."""

    def __init__(self) -> None:
        self._scratch: Tensor | None = None

    def rows(self, matrix: Tensor, vector: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the products of a matrix and of its squares with two vectors.

        Args:
            matrix: Matrix [m, k].
            vector: Factors [k] of the elements.
            weights: Factors [k] of the squares; None for ones.

        Returns:
            Products [m] and weighted sums of squares [m] of the rows.
        """
        products, squares = (vector.new_empty(len(matrix)) for _ in range(2))
        for rows, part in self._parts(matrix):
            torch.mv(part, vector, out=products[rows])
            if weights is None:
                torch.linalg.vector_norm(part, dim=1, out=squares[rows])
            else:
                torch.mv(self._squared(part), weights, out=squares[rows])
        return products, squares.square_() if weights is None else squares

    def add_columns(
        self, matrix: Tensor, vector: Tensor, weights: Tensor, products: Tensor, squares: Tensor
    ) -> None:
        """Add the products of a transposed matrix and of its squares with two vectors.

        Args:
            matrix: Matrix [m, k].
            vector: Factors [m] of the elements.
            weights: Factors [m] of the squares.
            products: Sums [k] to which the products are added.
            squares: Sums [k] to which the weighted squares are added.
        """
        for rows, part in self._parts(matrix):
            products.addmv_(part.t(), vector[rows])
            squares.addmv_(self._squared(part).t(), weights[rows])

    def checksums(self, matrix: Tensor, along: Tensor, across: Tensor) -> Checksums:
        """Return the checksums of a matrix [n, k] with signs [k] along its rows and [n] across them."""
        sums = Checksums(*(along.new_zeros(size) for size in (*matrix.shape[:1] * 2, *matrix.shape[1:] * 2)))
        ones = torch.ones_like(max(along, across, key=len))
        for rows, part in self._parts(matrix):
            squared = self._squared(part)
            torch.mv(part, along, out=sums.of_rows[rows])
            torch.mv(squared, ones[: len(along)], out=sums.row_squares[rows])
            sums.of_columns.addmv_(part.t(), across[rows])
            sums.column_squares.addmv_(squared.t(), ones[: len(part)])
        return sums

    def judge(
        self,
        bounds: ErrorBounds,
        expected: Tensor,
        actual: Tensor,
        added: Tensor,
        squares: Tensor,
        worst: Tensor,
    ) -> None:
        """Raise `worst` to the largest error of a row, in units of its bound.

        The error of an element comes from the rounding of its partial sums. These are about as large as the
        root of the sum of squares of its terms, or as the element itself; k additions cause root k times the
        error of one. Since the signs do not depend on the errors, the signed sum of a row's errors exceeds
        BOUND_FACTOR times the root of their sum of squares with a probability of e^-(BOUND_FACTOR^2 / 2)
        (Hoeffding). A result that is not finite is wrong if its operands are too small to cause an overflow.

        Args:
            bounds: Sizes and formats.
            expected: Expected signed sum of each row.
            actual: Signed sum of each row.
            added: Sum of squares of the terms of each row.
            squares: Sum of squares of the elements of each row.
            worst: Largest error so far, 0-dim.
        """
        most, size = (added * bounds.depth).sqrt_(), added.sqrt()  # Cauchy-Schwarz: no element is larger
        own = torch.fmin(squares.sqrt(), most)
        if bounds.uniform:
            # Large partial sums may cancel in the result of a row. Their size is estimated from other rows.
            own = torch.fmax(own, size * (own / size).nan_to_num_(0, 0, 0).mean())
        accumulation, additional = bounds.factors
        tolerance = (size + own).add_((own - BIAS_THRESHOLD * size).clamp_min_(0), alpha=BIAS_FACTOR)
        tolerance.mul_(accumulation).add_(bounds.least)
        tolerance.add_(size + own if bounds.uniform else own, alpha=additional)
        errors = torch.where(
            torch.isfinite(actual),
            (expected - actual).abs_() / tolerance,
            torch.where(most < bounds.largest, torch.inf, 0.0),
        )
        torch.maximum(worst, errors.nan_to_num_(0.0, torch.inf).amax(), out=worst)

    def _parts(self, matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of rows, and the rows in fp32."""
        rows = max(1, CHUNK_ELEMENTS // matrix.shape[1])
        for start in range(0, len(matrix), rows):
            part = matrix[start : start + rows]
            yield slice(start, start + len(part)), part.float()

    def _squared(self, part: Tensor) -> Tensor:
        """Return the squares of some rows, in memory that the next call overwrites."""
        if self._scratch is None or self._scratch.numel() < part.numel():
            self._scratch = part.new_empty(max(CHUNK_ELEMENTS, part.numel()))
        return torch.mul(part, part, out=self._scratch[: part.numel()].view(part.shape))


class CompiledAuditKernels(AuditKernels):
    """AuditKernels that use the library of `audit.c` for CPU matrices in fp32 and bf16, and torch for others.

    Args:
        library: The compiled library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    @override
    def rows(self, matrix: Tensor, vector: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not _is_supported(matrix):
            return super().rows(matrix, vector, weights)
        products, squares = torch.empty(2, len(matrix))
        self._library.audit_rows(
            *_matrix(matrix), *_addresses(vector, weights, products, squares), _size(matrix)
        )
        return products, squares

    @override
    def add_columns(
        self, matrix: Tensor, vector: Tensor, weights: Tensor, products: Tensor, squares: Tensor
    ) -> None:
        if not _is_supported(matrix):
            super().add_columns(matrix, vector, weights, products, squares)
            return
        operands = _addresses(vector, weights, products, squares)
        self._library.audit_columns(*_matrix(matrix), *operands, _size(matrix))

    @override
    def checksums(self, matrix: Tensor, along: Tensor, across: Tensor) -> Checksums:
        if not _is_supported(matrix):
            return super().checksums(matrix, along, across)
        n, k = matrix.shape
        sums = Checksums(*torch.empty(2, n), *torch.zeros(2, k))
        self._library.audit_matrix(*_matrix(matrix), *_addresses(along, across, *sums), _size(matrix))
        return sums

    @override
    def judge(
        self,
        bounds: ErrorBounds,
        expected: Tensor,
        actual: Tensor,
        added: Tensor,
        squares: Tensor,
        worst: Tensor,
    ) -> None:
        if not actual.is_cpu:
            super().judge(bounds, expected, actual, added, squares, worst)
            return
        self._library.audit_judge(
            ctypes.c_int64(len(actual)),
            *_addresses(expected, actual, added, squares),
            ctypes.c_int64(bounds.depth),
            *map(ctypes.c_float, bounds.factors),
            ctypes.c_float(bounds.largest),
            int(bounds.uniform),
            *map(ctypes.c_float, (bounds.least, BIAS_THRESHOLD, BIAS_FACTOR)),
            *_addresses(worst),
        )


def _is_supported(matrix: Tensor) -> bool:
    """Return True if the functions of `audit.c` support a matrix."""
    return matrix.is_cpu and matrix.dtype in {torch.float32, torch.bfloat16} and matrix.stride(1) == 1


def _matrix(matrix: Tensor) -> tuple[object, ...]:
    sizes = (*matrix.shape, matrix.stride(0))
    return ctypes.c_void_p(matrix.data_ptr()), *map(ctypes.c_int64, sizes)


def _addresses(*tensors: Tensor | None) -> list[object]:
    """Return the addresses of tensors."""
    assert all(each is None or each.is_contiguous() for each in tensors)
    return [ctypes.c_void_p(None if each is None else each.data_ptr()) for each in tensors]


def _size(matrix: Tensor) -> object:
    return ctypes.c_int(matrix.element_size())


def agree(one: AuditKernels, other: AuditKernels) -> bool:
    """Return True if two AuditKernels have the same results for some random matrices, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    values: list[list[torch.Tensor]] = [[], []]
    for rows, columns in ((9, 70), (4, 64)):
        matrix = torch.randn(rows, columns, generator=generator)
        along, across = torch.randn(columns, generator=generator), torch.randn(rows, generator=generator)
        for form in (torch.float32, torch.bfloat16):
            for kernels, results in zip((one, other), values, strict=True):
                sums = [torch.ones(columns), torch.ones(columns)]
                kernels.add_columns(matrix.to(form), across, across.square(), *sums)
                worst = torch.zeros(())
                actual = across + torch.linspace(0, 1, rows)
                bounds = ErrorBounds(columns, rows, form, form, 2, uniform=True)
                kernels.judge(bounds, across, actual, across.square(), actual.square(), worst)
                results += [
                    *kernels.rows(matrix.to(form), along, along.square()),
                    *kernels.rows(matrix.to(form), along),
                    *kernels.checksums(matrix.to(form), along, across),
                    *sums,
                    worst,
                ]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(*values, strict=True))
