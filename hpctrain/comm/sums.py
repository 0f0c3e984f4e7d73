"""What is carried along of tensors: fingerprints of their bits, and sums of their elements by block.

A sum over ranks is right only if the sums of what they give add up to those of what comes out. How far these
may be apart is bounded, never estimated. Let u be half the epsilon of a format, x_r what rank r of R gives,
A the sum of all |x_r| of a block of n elements. Adding R numbers in whatever order is off by at most
(R - 1) u A, with u of the format that transports add in: fp32 for halves, whose last rounding adds their own
u A. What is summed up here is off by c A for what is given, and as much for what comes out, where c is

- n 2^-53 in fp64, which has all of tensors below a block;
- of fp32 8 2^-24 + n 2^-53: columns of 8 in fp32, and these in fp64;
- of halves n 2^-24: a block in fp32.

Numbers below the smallest normal one, which a processor may take for zero, add 2 R + 1 of these for each
element, and the last rounding of halves half of the smallest one. All is taken a tenth too large, for terms
of second order. Of large blocks of fp32 A is known from the sum of squares, Q, by sqrt(n Q), and n times the
root of the smallest normal number for those whose squares vanish; where Q overflows nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, sqrt

import torch
from torch import Tensor

from hpctrain.comm.transports.reduction import HALVES, SIGNED
from hpctrain.comm.transports.transport import ElementRange

_WORD = 4
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_FINE = 1 << 18  # elements at a time: what a processor's second cache holds

BLOCK, HALVES_BLOCK = 1 << 18, 1 << 13
MOST_BLOCKS = 1024  # of a span
COLUMN = 8

_FP32, _FP64 = 2.0**-24, 2.0**-53
_TINY = torch.finfo(torch.float32).tiny


def fingerprint(values: Tensor) -> Tensor:
    """The wrapping sum of the 32-bit words of a flat tensor, an int32 0-dim on its device: the same wherever
    it lies, and another one if any single bit of it is.
    """
    each = max(1, _WORD // values.itemsize)
    if values.storage_offset() % each:
        total = torch.zeros((), dtype=torch.int32, device=values.device)
        for part in values.split(_FINE):
            total += fingerprint(part.clone())
        return total
    bits = values.view(_BITS[values.itemsize])
    if each == 1:
        return bits.sum(dtype=torch.int32)
    last = len(bits) // each * each
    total = bits[:last].view(torch.int32).sum(dtype=torch.int32)
    return total + bits[last:].sum(dtype=torch.int32) if last < len(bits) else total


def fingerprints(values: Tensor, spans: Sequence[ElementRange], rank: int) -> Tensor:
    """Those of each rank's span of a flat tensor; 0 for this rank's own, which moves nowhere."""
    known: dict[ElementRange, Tensor] = {}
    none = torch.zeros((), dtype=torch.int32, device=values.device)
    found = []
    for peer, span in enumerate(spans):
        begin, count = span
        if peer == rank or not count:
            found.append(none)
            continue
        if span not in known:
            known[span] = fingerprint(values[begin : begin + count])
        found.append(known[span])
    return torch.stack(found)


def is_linear(dtype: torch.dtype) -> bool:
    """Whether sums of such elements have sums that can be compared."""
    return dtype in {torch.float32, torch.float64, *HALVES} or not (
        dtype.is_floating_point or dtype == torch.bool
    )


def block_elements(longest: int, dtype: torch.dtype) -> int:
    """Elements of a block where the longest span has so many."""
    block = HALVES_BLOCK if dtype in HALVES else BLOCK
    while ceil(longest / block) > MOST_BLOCKS:
        block *= 2
    return block


def block_sums(values: Tensor, block: int, given: bool) -> tuple[Tensor, Tensor]:
    """Of each block of a flat tensor, the last one short, the sum, as fp64 on its device; of integers the
    bits of wrapping int64 sums. What is `given` has bounds on the sums of absolutes beside it, of integers 0;
    else there is the fingerprint of all blocks, which depends on where they begin.
    """
    dtype, count = values.dtype, ceil(len(values) / block)
    sums = torch.zeros((count, 2), dtype=torch.float64, device=values.device)
    bits = torch.zeros((), dtype=torch.int32, device=values.device)
    if not dtype.is_floating_point or dtype == torch.float64 or len(values) < block:
        for index, part in enumerate(values.split(block)[:count]):
            sums[index, 0] = exact_sum(part)
            if given:
                sums[index, 1] = absolute_sum(part)
            else:
                bits += fingerprint(part)
        return sums, bits
    full = len(values) // block
    rows, rest = values[: full * block].view(-1, block), values[full * block :]
    (_of_halves if dtype in HALVES else _of_floats)(rows, sums[:full], bits, given)
    if len(rest):
        last, of_rest = block_sums(rest, block, given)
        sums[full:] = last
        bits += of_rest
    return sums, bits


def exact_sum(values: Tensor) -> Tensor:
    """In fp64, or the bits of it in int64."""
    if values.is_floating_point():
        return values.double().sum()
    whole = values.view(SIGNED.get(values.dtype, values.dtype))
    wide = torch.int32 if whole.itemsize == _WORD else torch.int64
    return whole.sum(dtype=wide).long().view(torch.float64)


def absolute_sum(values: Tensor) -> Tensor:
    """In fp64; of integers, which need none, 0."""
    if values.is_floating_point():
        return values.double().abs().sum()
    return torch.zeros((), dtype=torch.float64, device=values.device)


def _of_floats(rows: Tensor, sums: Tensor, bits: Tensor, given: bool) -> None:
    block = rows.shape[1]
    ones = rows.new_ones(COLUMN)
    columns, squares = rows.new_empty(block // COLUMN), rows.new_empty(len(rows))
    for index, row in enumerate(rows):  # the second time a row is still in the cache
        torch.mv(row.view(COLUMN, -1).t(), ones, out=columns)
        sums[index, 0] = columns.double().sum()
        if given:
            torch.dot(row, row, out=squares[index])
        else:
            bits += fingerprint(row)
    if given:
        sums[:, 1] = (squares.double() * block * (1 + block * 2 * _FP32)).sqrt_() + block * sqrt(_TINY)


def _of_halves(rows: Tensor, sums: Tensor, bits: Tensor, given: bool) -> None:
    block = rows.shape[1]
    several = max(1, _FINE // block)
    for first in range(0, len(rows), several):
        some = rows[first : first + several]
        wide, into = some.float(), sums[first : first + several]
        into[:, 0] = wide.sum(1)
        if given:
            into[:, 1] = wide.abs_().sum(1).double() * (1 + block * 2 * _FP32)
        else:
            bits += fingerprint(some.reshape(-1))


@lru_cache(256)
def rounding(size: int, elements: int, block: int, dtype: torch.dtype) -> tuple[float, float]:
    """How far sums over `size` ranks may be off in a block that has so many elements: by the first number
    times the sum of absolutes, and by the second.
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
