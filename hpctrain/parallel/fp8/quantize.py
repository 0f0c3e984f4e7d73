"""Quantization of matrices to 8 bits, with a scale for each block of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.group import Group
from hpctrain.parallel.fp8.formats import (
    ELEMENTS_AT_ONCE,
    FORMATS,
    Fp8Format,
    exponents_of,
    is_transposed,
    scales_of,
    scales_of_exponents,
    to_format,
    upcast,
)


class ScaleBlocks(NamedTuple):
    """Size of the blocks of a matrix that share a scale. The last ones may be smaller.

    Attributes:
        rows: Rows of a block. None for all.
        columns: Columns of a block. None for all.
    """

    rows: int | None = None
    columns: int | None = None

    def counts(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the number of blocks along both dims of a matrix."""
        rows, columns = (
            1 if size is None else -(-count // size) for count, size in zip(shape, self, strict=True)
        )
        return rows, columns

    def to_blocks(self, matrix: Tensor) -> Tensor:
        """Return the blocks of a matrix [m, k] as [M, rows, K, columns]: a view, or a padded copy."""
        rows, columns = matrix.shape
        block_rows, block_columns = self.counts((rows, columns))
        each_rows = max(1, rows) if self.rows is None else self.rows
        each_columns = max(1, columns) if self.columns is None else self.columns
        missing = (block_rows * each_rows - rows, block_columns * each_columns - columns)
        if any(missing):
            matrix = functional.pad(matrix, (0, missing[1], 0, missing[0]))
        by_column = matrix.unflatten(1, (block_columns, each_columns))
        blocks: Tensor = by_column.unflatten(0, (block_rows, each_rows))
        return blocks

    def from_blocks(self, blocks: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the matrix of a shape that `to_blocks` has cut into blocks, contiguous by rows."""
        rows, columns = shape
        return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()

    def multiply(self, matrix: Tensor, factors: Tensor) -> None:
        """Multiply each block of a matrix [m, k] by its factor in [M, K], in place.

        Smaller blocks are not padded, which would take the memory of another matrix.
        """
        for rows, block_rows, height in _block_ranges(matrix.shape[0], self.rows):
            for columns, block_columns, width in _block_ranges(matrix.shape[1], self.columns):
                blocks = matrix[rows, columns].unflatten(1, (-1, width)).unflatten(0, (-1, height))
                blocks.mul_(factors[block_rows, None, block_columns, None])

    def conversion_rows(self, matrix: Tensor) -> int:
        """Return the number of rows that the CPU converts at a time: about `ELEMENTS_AT_ONCE` elements.

        It is a multiple of the rows of a block, so that no block is in two parts.
        """
        rows = max(1, ELEMENTS_AT_ONCE // max(1, matrix.shape[1]))
        return rows if self.rows is None else -(-rows // self.rows) * self.rows

    @property
    def transposed(self) -> ScaleBlocks:
        """Blocks of the transposed matrix."""
        return ScaleBlocks(self.columns, self.rows)


def _block_ranges(count: int, size: int | None) -> Iterator[tuple[slice, slice, int]]:
    """Yield elements of a dim, their blocks and the size of these: complete blocks, then a smaller one."""
    size = size or count
    complete = count // size if size else 0
    if complete:
        yield slice(0, complete * size), slice(0, complete), size
    if rest := count - complete * size:
        yield slice(complete * size, count), slice(complete, complete + 1), rest


def block_maxima(matrix: Tensor, blocks: ScaleBlocks) -> Tensor:
    """Return the largest magnitude of each block of [m, k], fp32 [M, K]; NaN if a block has one."""
    if not matrix.is_cpu:
        return blocks.to_blocks(matrix).abs().amax((1, 3)).float()
    if is_transposed(matrix):
        return block_maxima(matrix.t(), blocks.transposed).t()
    parts = [
        _largest_magnitudes(blocks.to_blocks(part)) for part in matrix.split(blocks.conversion_rows(matrix))
    ]
    maxima = torch.cat(parts)
    return (maxima.amax(0, keepdim=True) if blocks.rows is None else maxima).float()


def _largest_magnitudes(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of blocks [M, rows, K, columns] on the CPU, [M, K].

    16-bit numbers are compared as integers, which have the same order, with NaN last: a fifth of the time.
    """
    if blocks.dtype not in {torch.bfloat16, torch.float16}:
        return blocks.abs().amax((1, 3))
    return blocks.view(torch.int16).bitwise_and(0x7FFF).amax((1, 3)).view(blocks.dtype)


@dataclass(frozen=True)
class QuantizedTensor:
    """Matrix [m, k] in 8 bits.

    Attributes:
        values: Elements [m, k], of which rows or columns are contiguous.
        scales: Scale of each block [M, K], powers of two in fp32 or as bytes.
        blocks: Size of the blocks.
    """

    values: Tensor
    scales: Tensor
    blocks: ScaleBlocks

    @property
    def fp32_scales(self) -> Tensor:
        """Scales in fp32, [M, K]."""
        return scales_of_exponents(self.scales) if self.scales.dtype == torch.uint8 else self.scales

    @property
    def form(self) -> Fp8Format:
        """Format of the values."""
        return FORMATS[self.values.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Values and scales, as autograd saves them."""
        return self.values, self.scales

    @property
    def has_row_scales(self) -> bool:
        """True if each row has one scale, by which a product can be multiplied afterwards."""
        return self.blocks.columns is None

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix [m, k], exactly in fp32, and in bf16 except below its smallest normal number."""
        if self.values.is_cpu and is_transposed(self.values):
            return self.transposed().dequantized(dtype).t()
        matrix = upcast(self.values, dtype)
        self.blocks.multiply(matrix, self.fp32_scales.to(dtype))
        return matrix.contiguous()

    def transposed(self) -> QuantizedTensor:
        """Return the transposed matrix with the same numbers, and transposed blocks.

        Unless blocks are square, quantizing the transposed matrix with the same blocks gives another result.
        """
        return QuantizedTensor(self.values.t(), self.scales.t().contiguous(), self.blocks.transposed)

    def start_gather(self, group: Group, blocking: bool = False) -> Callable[[], QuantizedTensor]:
        """Start to gather the rows of all ranks, in their order, and return a function that waits.

        Collective. The result is what quantizing all rows at once gives if no block has rows of two ranks, or
        if ranks use the same scale for such a block.

        Args:
            group: Ranks that have the other rows.
            blocking: True if the caller waits at once.
        """
        values = group.start_all_gather(self.values.view(torch.uint8), blocking=blocking)
        by_rows = self.blocks.rows is not None
        scales = group.start_all_gather(self.scales, blocking=blocking) if by_rows else None

        def finish() -> QuantizedTensor:
            rows = values.wait().view(self.values.dtype)
            return replace(self, values=rows, scales=self.scales if scales is None else scales.wait())

        return finish

    def gather(self, group: Group) -> QuantizedTensor:
        """Return the rows of all ranks, as `start_gather` gathers them. Collective."""
        return self.start_gather(group, blocking=True)()


@dataclass(frozen=True)
class Scaling:
    """Scaling of matrices of one kind.

    Attributes:
        blocks: Elements that share a scale.
        as_bytes: True if scales are stored as bytes (E8M0).
    """

    blocks: ScaleBlocks
    as_bytes: bool = False

    @property
    def transposed(self) -> Scaling:
        """Scaling that scales a matrix as this one scales its transpose."""
        return replace(self, blocks=self.blocks.transposed)

    def maxima(self, matrix: Tensor) -> Tensor:
        """Return the largest magnitude of each block of [m, k], fp32 [M, K]."""
        return block_maxima(matrix, self.blocks)

    def quantize(self, matrix: Tensor, form: Fp8Format, maxima: Tensor | None = None) -> QuantizedTensor:
        """Return a matrix [m, k] in a format.

        Args:
            matrix: The matrix.
            form: The format.
            maxima: Maxima of the blocks [M, K] over all ranks, or of earlier steps; by default those of the
                matrix. What is larger becomes the largest number of the format.
        """
        maxima = self.maxima(matrix) if maxima is None else maxima
        if matrix.is_cpu and is_transposed(matrix):
            return self.transposed.quantize(matrix.t(), form, maxima.t()).transposed()
        scales = scales_of(maxima, form)
        values = self._round(matrix, scales, form)
        return QuantizedTensor(values, exponents_of(scales) if self.as_bytes else scales, self.blocks)

    def _round(self, matrix: Tensor, scales: Tensor, form: Fp8Format) -> Tensor:
        """Return the rounded values. The CPU converts some rows at a time."""
        blocks, columns = self.blocks, matrix.shape[1]
        if not matrix.is_cpu:
            rounded = to_format(blocks.to_blocks(matrix) / scales[:, None, :, None], form)
            return blocks.from_blocks(rounded, (matrix.shape[0], columns))
        values = torch.empty(matrix.shape, dtype=form.dtype)
        count = blocks.conversion_rows(matrix)
        for first in range(0, len(matrix), count):
            part = matrix[first : first + count]
            shape = (len(part), columns)
            row = 0 if blocks.rows is None else first // blocks.rows
            row_scales = scales[row : row + blocks.counts(shape)[0]]
            rounded = to_format(blocks.to_blocks(part) / row_scales[:, None, :, None], form)
            values[first : first + count] = blocks.from_blocks(rounded, shape)
        return values
