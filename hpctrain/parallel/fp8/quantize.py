"""Matrices in 8 bits an element, with a scale for each block of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.parallel.fp8.formats import (
    AT_ONCE,
    FORMATS,
    Fp8Format,
    expanded,
    expanded_exponents,
    exponents_of,
    is_transposed,
    scales_of,
    to_format,
)


class ScaleBlocks(NamedTuple):
    """So many rows and columns of a matrix that share a scale; None: all. The last ones may be smaller."""

    rows: int | None = None
    columns: int | None = None

    def counts(self, shape: tuple[int, int]) -> tuple[int, int]:
        """How many of them a matrix has below and beside each other."""
        rows, columns = (
            1 if size is None else -(-count // size) for count, size in zip(shape, self, strict=True)
        )
        return rows, columns

    def cut(self, matrix: Tensor) -> Tensor:
        """[m, k] -> [M, rows, K, columns]: a view, or a copy where blocks have to be filled up, by zeros."""
        (rows, columns), (below, beside) = matrix.shape, self.counts((matrix.shape[0], matrix.shape[1]))
        each_rows = max(1, rows) if self.rows is None else self.rows
        each_columns = max(1, columns) if self.columns is None else self.columns
        missing = (below * each_rows - rows, beside * each_columns - columns)
        if any(missing):
            matrix = functional.pad(matrix, (0, missing[1], 0, missing[0]))
        blocks: Tensor = matrix.unflatten(1, (beside, each_columns)).unflatten(0, (below, each_rows))
        return blocks

    def joined(self, blocks: Tensor, shape: tuple[int, int]) -> Tensor:
        """What `cut` made of a matrix of this shape as one again, row after row."""
        rows, columns = shape
        return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()

    def multiply(self, matrix: Tensor, factors: Tensor) -> None:
        """Multiply [m, k], in place, each block by its own of the factors [M, K]. Smaller ones are not filled
        up: that would take the memory of another matrix.
        """
        for rows, below, height in _alike(matrix.shape[0], self.rows):
            for columns, beside, width in _alike(matrix.shape[1], self.columns):
                blocks = matrix[rows, columns].unflatten(1, (-1, width)).unflatten(0, (-1, height))
                blocks.mul_(factors[below, None, beside, None])

    def height(self, matrix: Tensor) -> int:
        """Rows of [m, k] that the CPU converts at a time, of whole blocks where these have some rows."""
        rows = max(1, AT_ONCE // max(1, matrix.shape[1]))
        return rows if self.rows is None else -(-rows // self.rows) * self.rows

    @property
    def transposed(self) -> ScaleBlocks:
        """Those of the transposed matrix."""
        return ScaleBlocks(self.columns, self.rows)


def _alike(count: int, size: int | None) -> Iterator[tuple[slice, slice, int]]:
    """Of a dim the elements in blocks of a size, which blocks these are, and the size: of whole ones, then of
    a smaller last one.
    """
    size = size or count
    whole = count // size if size else 0
    if whole:
        yield slice(0, whole * size), slice(0, whole), size
    if rest := count - whole * size:
        yield slice(whole * size, count), slice(whole, whole + 1), rest


def block_maxima(matrix: Tensor, blocks: ScaleBlocks) -> Tensor:
    """The largest magnitude of each block of [m, k], fp32 [M, K]; NaN where a block has one."""
    if not matrix.is_cpu:
        return blocks.cut(matrix).abs().amax((1, 3)).float()
    if is_transposed(matrix):
        return block_maxima(matrix.t(), blocks.transposed).t()
    parts = [_largest(blocks.cut(part)) for part in matrix.split(blocks.height(matrix))]
    together = torch.cat(parts)
    return (together.amax(0, keepdim=True) if blocks.rows is None else together).float()


def _largest(blocks: Tensor) -> Tensor:
    """The largest magnitude of [M, rows, K, columns], [M, K], on the CPU.

    Of 16 bits by these as integers, which order magnitudes, and NaN above them: a fifth of the time.
    """
    if blocks.dtype not in {torch.bfloat16, torch.float16}:
        return blocks.abs().amax((1, 3))
    return blocks.view(torch.int16).bitwise_and(0x7FFF).amax((1, 3)).view(blocks.dtype)


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [m, k] in 8 bits an element: `values`, whose rows or columns lie behind each other, and
    `scales` [M, K] of its `blocks`, powers of two in fp32 or as bytes.
    """

    values: Tensor
    scales: Tensor
    blocks: ScaleBlocks

    @property
    def factors(self) -> Tensor:
        """The scales, fp32 [M, K]."""
        return expanded_exponents(self.scales) if self.scales.dtype == torch.uint8 else self.scales

    @property
    def form(self) -> Fp8Format:
        """Of the values."""
        return FORMATS[self.values.dtype]

    @property
    def bytes(self) -> int:
        """Of the memory of both."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def scaled_alike(self) -> bool:
        """Whether a row has one scale, which can be multiplied by after a product."""
        return self.blocks.columns is None

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [m, k] that this stands for, exactly in fp32, and in bf16 but for what is less than its
        least normal number.
        """
        if self.values.is_cpu and is_transposed(self.values):
            return self.transposed().dequantized(dtype).t()
        matrix = expanded(self.values, dtype)
        self.blocks.multiply(matrix, self.factors.to(dtype))
        return matrix.contiguous()

    def transposed(self) -> QuantizedTensor:
        """The same numbers as the transposed matrix, its blocks transposed, too.

        Unless these are square, it is not what quantizing the transposed matrix by the same blocks gives.
        """
        return QuantizedTensor(self.values.t(), self.scales.t().contiguous(), self.blocks.transposed)


@dataclass(frozen=True)
class Scaling:
    """How matrices of one kind are scaled: `blocks` that share a scale, and whether scales are kept as bytes
    of an exponent.
    """

    blocks: ScaleBlocks
    as_bytes: bool = False

    @property
    def transposed(self) -> Scaling:
        """What scales a matrix as this scales the transposed one."""
        return replace(self, blocks=self.blocks.transposed)

    def maxima(self, matrix: Tensor) -> Tensor:
        """The largest magnitude of each block of [m, k], fp32 [M, K]."""
        return block_maxima(matrix, self.blocks)

    def quantized(self, matrix: Tensor, form: Fp8Format, maxima: Tensor | None = None) -> QuantizedTensor:
        """[m, k] in a format. `maxima` [M, K] are the blocks' where other ranks have parts of them, or are
        of steps before; what is larger becomes the format's largest number.
        """
        maxima = self.maxima(matrix) if maxima is None else maxima
        if matrix.is_cpu and is_transposed(matrix):
            return self.transposed.quantized(matrix.t(), form, maxima.t()).transposed()
        scales = scales_of(maxima, form)
        values = self._rounded(matrix, scales, form)
        return QuantizedTensor(values, exponents_of(scales) if self.as_bytes else scales, self.blocks)

    def _rounded(self, matrix: Tensor, scales: Tensor, form: Fp8Format) -> Tensor:
        """On the CPU some rows after others."""
        blocks, columns = self.blocks, matrix.shape[1]
        if not matrix.is_cpu:
            rounded = to_format(blocks.cut(matrix) / scales[:, None, :, None], form)
            return blocks.joined(rounded, (matrix.shape[0], columns))
        values = torch.empty(matrix.shape, dtype=form.dtype)
        height = blocks.height(matrix)
        for first in range(0, len(matrix), height):
            part = matrix[first : first + height]
            shape = (len(part), columns)
            row = 0 if blocks.rows is None else first // blocks.rows
            own = scales[row : row + blocks.counts(shape)[0]]
            rounded = to_format(blocks.cut(part) / own[:, None, :, None], form)
            values[first : first + height] = blocks.joined(rounded, shape)
        return values
