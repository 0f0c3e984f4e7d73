"""Sums of blocks of a tensor, and bounds of their rounding error.

A block sum is the sum of the n elements of one block of a tensor. A sum over ranks can only be right if the
block sums of all inputs add up to the block sum of the result, except for rounding errors. The allowed
difference is a proven bound of these. R is the number of ranks. A is the sum of the absolute values of the
elements of the block in the inputs of all ranks. u is half the epsilon of a floating-point format. The bound
has these terms:

The sum over ranks has an error of at most (R - 1) u A in any order of additions, with the u of the format in
which transports add. For 16-bit types this is fp32; the final rounding adds u A with the u of the type
itself. The block sums have an error of at most c A for the inputs and another c A for the result, where c is

- n 2^-53 for fp64, in which all tensors smaller than a block are added,
- 8 2^-24 + n 2^-53 for fp32, which is added in columns of 8 in fp32, and these in fp64,
- n 2^-24 for 16-bit formats, which are added in fp32.

A processor may treat numbers below the smallest normal number as zero. This adds 2 R + 1 times that number
per element. The final rounding to a 16-bit type adds half of the smallest number of the type per element. The
bounds are 10% larger than the sum of these terms, which covers products of errors. For full blocks of fp32, A
is not computed but replaced by an upper bound: sqrt(n Q), where Q is the sum of squares, plus n times the
square root of the smallest normal number, for elements whose squares are too small to count. If Q overflows,
the block is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, sqrt

import torch
from torch import Tensor

from hpctrain.audit.bits import word_sum
from hpctrain.comm.transports.reduction import HALVES, SIGNED
from hpctrain.comm.transports.transport import ElementRange

_WORD = 4
_CHUNK_ELEMENTS = 1 << 18  # fits into the second-level cache of a processor

SUM_BLOCK, HALVES_BLOCK = 1 << 18, 1 << 13
"""Number of elements of a block, and of a block of a 16-bit type."""

MOST_BLOCKS = 1024
"""Largest number of blocks of the data of one rank. Larger tensors have larger blocks."""

COLUMN = 8
"""Number of elements that are added in fp32, before their sums are added in fp64."""

_FP32, _FP64 = 2.0**-24, 2.0**-53
_TINY = torch.finfo(torch.float32).tiny


def word_sums_by_rank(values: Tensor, spans: Sequence[ElementRange], rank: int) -> Tensor:
    """Return a checksum (`word_sum`) of the data that is sent to, or comes from, each rank.

    Args:
        values: Flat contiguous tensor of any dtype of 1, 2, 4 or 8 bytes.
        spans: For each rank, the first element and the number of elements of its span. Spans may overlap.
        rank: This rank. Its own data is not sent, and its checksum is 0, like that of an empty span.

    Returns:
        An int32 tensor `[ranks]` on the device of `values`.
    """
    known: dict[ElementRange, Tensor] = {}
    none = torch.zeros((), dtype=torch.int32, device=values.device)
    found = []
    for peer, span in enumerate(spans):
        begin, count = span
        if peer == rank or not count:
            found.append(none)
            continue
        if span not in known:
            known[span] = word_sum(values[begin : begin + count])
        found.append(known[span])
    return torch.stack(found)


def can_compare_sums(dtype: torch.dtype) -> bool:
    """Return True if `block_sums` can check sums of this dtype: fp64, fp32, fp16, bf16 and integers."""
    return dtype in {torch.float32, torch.float64, *HALVES} or not (
        dtype.is_floating_point or dtype == torch.bool
    )


def block_elements(longest: int, dtype: torch.dtype) -> int:
    """Return the number of elements of a block, so large that no rank has more than MOST_BLOCKS blocks.

    It is HALVES_BLOCK for 16-bit floats and SUM_BLOCK for other types, doubled until that holds. All ranks
    must get the same result, and therefore pass the same arguments.

    Args:
        longest: Number of elements of the longest span of a rank; may be 0.
        dtype: Type of the elements.
    """
    block = HALVES_BLOCK if dtype in HALVES else SUM_BLOCK
    while ceil(longest / block) > MOST_BLOCKS:
        block *= 2
    return block


def block_sums(values: Tensor, block: int, is_input: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of each block of a flat tensor, whose last block may be shorter, and a checksum.

    Args:
        values: Flat contiguous tensor, perhaps empty, of a dtype for which `can_compare_sums` is True.
        block: Number of elements of a block.
        is_input: True for an input of a sum over ranks, False for its result.

    Returns:
        A tensor `[blocks, 2]` in fp64, and an int32 tensor without dims, both on the device of `values`. The
        first column has the sums. Sums of integers wrap; they are int64 numbers, which `.view(torch.int64)`
        reads. For an input, the second column has the sums of absolute values or upper bounds of them (0 for
        integers), and the checksum is 0. For a result, the second column is 0, and the checksum is that of
        all blocks; it depends on where the blocks begin.
    """
    dtype, count = values.dtype, ceil(len(values) / block)
    sums = torch.zeros((count, 2), dtype=torch.float64, device=values.device)
    bits = torch.zeros((), dtype=torch.int32, device=values.device)
    if not dtype.is_floating_point or dtype == torch.float64 or len(values) < block:
        for index, part in enumerate(values.split(block)[:count]):
            sums[index, 0] = exact_sum(part)
            if is_input:
                sums[index, 1] = absolute_sum(part)
            else:
                bits += word_sum(part)
        return sums, bits
    full = len(values) // block
    rows, rest = values[: full * block].view(-1, block), values[full * block :]
    (_of_halves if dtype in HALVES else _of_floats)(rows, sums[:full], bits, is_input)
    if len(rest):
        last, of_rest = block_sums(rest, block, is_input)
        sums[full:] = last
        bits += of_rest
    return sums, bits


def exact_sum(values: Tensor) -> Tensor:
    """Return the sum of a flat tensor in fp64, without dims; for integers, the bits of the int64 sum as fp64.

    Sums of integers wrap. The result is on the device of `values`.
    """
    if values.is_floating_point():
        return values.double().sum()
    whole = values.view(SIGNED.get(values.dtype, values.dtype))
    wide = torch.int32 if whole.itemsize == _WORD else torch.int64
    return whole.sum(dtype=wide).long().view(torch.float64)


def absolute_sum(values: Tensor) -> Tensor:
    """Return the sum of absolute values of a flat tensor in fp64, without dims; 0 for integers."""
    if values.is_floating_point():
        return values.double().abs().sum()
    return torch.zeros((), dtype=torch.float64, device=values.device)


def _of_floats(rows: Tensor, sums: Tensor, bits: Tensor, is_input: bool) -> None:
    """Compute `block_sums` of full fp32 blocks `rows` into `sums` and `bits`."""
    block = rows.shape[1]
    ones = rows.new_ones(COLUMN)
    columns, squares = rows.new_empty(block // COLUMN), rows.new_empty(len(rows))
    for index, row in enumerate(rows):  # row by row, so that a row is in the cache when it is read again
        torch.mv(row.view(COLUMN, -1).t(), ones, out=columns)
        sums[index, 0] = columns.double().sum()
        if is_input:
            torch.dot(row, row, out=squares[index])
        else:
            bits += word_sum(row)
    if is_input:
        sums[:, 1] = (squares.double() * block * (1 + block * 2 * _FP32)).sqrt_() + block * sqrt(_TINY)


def _of_halves(rows: Tensor, sums: Tensor, bits: Tensor, is_input: bool) -> None:
    """Compute `block_sums` of full blocks `rows` of a 16-bit type into `sums` and `bits`."""
    block = rows.shape[1]
    several = max(1, _CHUNK_ELEMENTS // block)
    for first in range(0, len(rows), several):
        some = rows[first : first + several]
        wide, into = some.float(), sums[first : first + several]
        into[:, 0] = wide.sum(1)
        if is_input:
            into[:, 1] = wide.abs_().sum(1).double() * (1 + block * 2 * _FP32)
        else:
            bits += word_sum(some.reshape(-1))


@lru_cache(256)
def rounding_bounds(size: int, elements: int, block: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return `factor` and `constant` of the rounding error that is allowed for the sum of a block.

    The sum of a correct result's block, as `block_sums` computes it, differs from the sum of the inputs'
    blocks by at most `factor * absolute + constant`, where `absolute` is the sum of the absolute values of
    all these inputs. This holds for any order of additions over ranks, if 16-bit floats are added in fp32 and
    rounded once.

    Args:
        size: Number of ranks over which the tensor is summed.
        elements: Number of elements of this block, at most `block`.
        block: Number of elements of a full block. Shorter blocks are added in fp64, so that their bound is
            smaller.
        dtype: Format of the elements.

    Raises:
        TypeError: The dtype is not a floating-point format.
    """
    info = torch.finfo(dtype)
    adds = _FP64 if dtype == torch.float64 else _FP32
    each = (size - 1) * adds + (info.eps / 2 if dtype in HALVES else 0.0)
    if elements < block or dtype == torch.float64:
        carried = elements * _FP64
    elif dtype in HALVES:
        carried = elements * _FP32
    else:
        carried = COLUMN * _FP32 + elements * _FP64
    vanishing = torch.finfo(torch.float64).tiny if dtype == torch.float64 else _TINY
    last = info.tiny * info.eps / 2 if dtype in HALVES else 0.0
    return 1.1 * (each + 2 * carried), 1.1 * elements * ((2 * size + 1) * vanishing + last)
