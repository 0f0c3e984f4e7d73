"""The passes over matrices by which an audit judges products: by torch, or on a CPU compiled, in one go each.

All sums are in fp32.
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

REACH = 8.0
"""Of rounding, see `judge`: of rows whose errors are all alike, the worst, 1e-14 are beyond."""

AT_ONCE = 1 << 20
"""Elements that torch looks at at a time: what one pass has read is near for the next."""

COHERENT, BIASED = 4.0, 5.0
"""What elements come to above so many times the root of squares, as where all tokens are the same, may be
rounded the same way each time: so much more than by chance.
"""

LEAST = 1e-17
"""What is smaller may have a square that is none."""


class Checksums(NamedTuple):
    """What stands for a matrix W [n, k] in a step: W s [n] and W^T r [k], and sums of squares of its rows and
    of its columns.
    """

    of_rows: Tensor
    row_squares: Tensor
    of_columns: Tensor
    column_squares: Tensor


@dataclass(frozen=True)
class ErrorBounds:
    """Of elements of a result: how many numbers each is the sum of, how many of them are added up by signs,
    the result's format, and to what, and how often, they were `rounded` besides. Where `alike`, what is added
    to all rows is of the same kind.
    """

    depth: int
    width: int
    dtype: torch.dtype
    rounded: torch.dtype | None = None
    times: int = 1
    alike: bool = False

    @property
    def factors(self) -> tuple[float, float]:
        """By what sizes are multiplied for a tolerance of adding up, and for one of rounding besides."""
        unit = torch.finfo(torch.float32).eps / 2
        besides = 0.0 if self.rounded is None else torch.finfo(self.rounded).eps / 2 * math.sqrt(self.times)
        return REACH * unit * math.sqrt((self.depth + self.width) / 6), REACH * besides

    @property
    def least(self) -> float:
        """What is added to tolerances: numbers near the least of a format are rounded to multiples of it."""
        if self.rounded is None:
            return LEAST
        form = torch.finfo(self.rounded)
        multiple: float = form.smallest_normal * form.eps
        return LEAST + REACH * math.sqrt(self.width * self.times) * multiple

    @property
    def largest(self) -> float:
        """The largest number that is certain to be one in the formats."""
        return torch.finfo(self.dtype if self.rounded is None else self.rounded).max / 2


class AuditKernels:
    """By torch."""

    def __init__(self) -> None:
        self._room: Tensor | None = None

    def rows(self, matrix: Tensor, vector: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of [m, k] the product [m] with a vector [k], and that of its squares with weights [k], or ones."""
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
        """`products` [k] += matrix [m, k]^T vector [m], and `squares` so of its squares with weights [m]."""
        for rows, part in self._parts(matrix):
            products.addmv_(part.t(), vector[rows])
            squares.addmv_(self._squared(part).t(), weights[rows])

    def checksums(self, matrix: Tensor, along: Tensor, across: Tensor) -> Checksums:
        """Those of a matrix [n, k] by signs [k] along its rows, and [n] across them."""
        found = Checksums(*(along.new_zeros(size) for size in (*matrix.shape[:1] * 2, *matrix.shape[1:] * 2)))
        ones = torch.ones_like(max(along, across, key=len))
        for rows, part in self._parts(matrix):
            squared = self._squared(part)
            torch.mv(part, along, out=found.of_rows[rows])
            torch.mv(squared, ones[: len(along)], out=found.row_squares[rows])
            found.of_columns.addmv_(part.t(), across[rows])
            found.column_squares.addmv_(squared.t(), ones[: len(part)])
        return found

    def judge(
        self,
        bounds: ErrorBounds,
        expected: Tensor,
        there: Tensor,
        added: Tensor,
        squares: Tensor,
        worst: Tensor,
    ) -> None:
        """Make `worst` [] the most by which a row is off, in tolerances, if it is more.

        Of each row: what its product with signs is to be and is; the sums of squares of what its elements are
        sums of, and of themselves. An element is rounded as its partial sums are, which are about as large as
        the root of the former, or as what they come to; k additions round by the root of k times what one
        does. As signs do not depend on errors, what these add up to is beyond REACH times the root of their
        squares in e^-(REACH^2 / 2) of all cases (Hoeffding). What is no number is wrong where the operands
        cannot have made it.
        """
        most, size = (added * bounds.depth).sqrt_(), added.sqrt()  # Cauchy and Schwarz: it comes to no more
        own = torch.fmin(squares.sqrt(), most)
        if bounds.alike:
            # What cancels in one row in the end may have been large meanwhile, as in others.
            own = torch.fmax(own, size * (own / size).nan_to_num_(0, 0, 0).mean())
        accumulated, besides = bounds.factors
        tolerance = (size + own).add_((own - COHERENT * size).clamp_min_(0), alpha=BIASED)
        tolerance.mul_(accumulated).add_(bounds.least)
        tolerance.add_(size + own if bounds.alike else own, alpha=besides)
        off = torch.where(
            torch.isfinite(there),
            (expected - there).abs_() / tolerance,
            torch.where(most < bounds.largest, torch.inf, 0.0),
        )
        torch.maximum(worst, off.nan_to_num_(0.0, torch.inf).amax(), out=worst)

    def _parts(self, matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Some rows after others, and which."""
        rows = max(1, AT_ONCE // matrix.shape[1])
        for start in range(0, len(matrix), rows):
            part = matrix[start : start + rows]
            yield slice(start, start + len(part)), part.float()

    def _squared(self, part: Tensor) -> Tensor:
        """The squares of some rows, until others' are taken."""
        if self._room is None or self._room.numel() < part.numel():
            self._room = part.new_empty(max(AT_ONCE, part.numel()))
        return torch.mul(part, part, out=self._room[: part.numel()].view(part.shape))


class CompiledAuditKernels(AuditKernels):
    """By the library of `audit.c`, of what that knows."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    @override
    def rows(self, matrix: Tensor, vector: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not _is_known(matrix):
            return super().rows(matrix, vector, weights)
        products, squares = torch.empty(2, len(matrix))
        self._library.audit_rows(*_matrix(matrix), *_at(vector, weights, products, squares), _size(matrix))
        return products, squares

    @override
    def add_columns(
        self, matrix: Tensor, vector: Tensor, weights: Tensor, products: Tensor, squares: Tensor
    ) -> None:
        if not _is_known(matrix):
            super().add_columns(matrix, vector, weights, products, squares)
            return
        operands = _at(vector, weights, products, squares)
        self._library.audit_columns(*_matrix(matrix), *operands, _size(matrix))

    @override
    def checksums(self, matrix: Tensor, along: Tensor, across: Tensor) -> Checksums:
        if not _is_known(matrix):
            return super().checksums(matrix, along, across)
        n, k = matrix.shape
        found = Checksums(*torch.empty(2, n), *torch.zeros(2, k))
        self._library.audit_matrix(*_matrix(matrix), *_at(along, across, *found), _size(matrix))
        return found

    @override
    def judge(
        self,
        bounds: ErrorBounds,
        expected: Tensor,
        there: Tensor,
        added: Tensor,
        squares: Tensor,
        worst: Tensor,
    ) -> None:
        if not there.is_cpu:
            super().judge(bounds, expected, there, added, squares, worst)
            return
        self._library.audit_judge(
            ctypes.c_int64(len(there)),
            *_at(expected, there, added, squares),
            ctypes.c_int64(bounds.depth),
            *map(ctypes.c_float, bounds.factors),
            ctypes.c_float(bounds.largest),
            int(bounds.alike),
            *map(ctypes.c_float, (bounds.least, COHERENT, BIASED)),
            *_at(worst),
        )


def _is_known(matrix: Tensor) -> bool:
    """Whether a matrix is what `audit.c` takes."""
    return matrix.is_cpu and matrix.dtype in {torch.float32, torch.bfloat16} and matrix.stride(1) == 1


def _matrix(matrix: Tensor) -> tuple[object, ...]:
    sizes = (*matrix.shape, matrix.stride(0))
    return ctypes.c_void_p(matrix.data_ptr()), *map(ctypes.c_int64, sizes)


def _at(*tensors: Tensor | None) -> list[object]:
    """Their addresses."""
    assert all(each is None or each.is_contiguous() for each in tensors)
    return [ctypes.c_void_p(None if each is None else each.data_ptr()) for each in tensors]


def _size(matrix: Tensor) -> object:
    return ctypes.c_int(matrix.element_size())
