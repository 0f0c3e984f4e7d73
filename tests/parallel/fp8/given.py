"""The formats of 8 bits in numpy, by their bits alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.parallel.fp8.formats import E4M3, E5M2, Fp8Format

Numbers = NDArray[np.float64]

BITS = {E4M3: (4, 3, 7), E5M2: (5, 2, 15)}
"""Of exponent and fraction, and what an exponent is told as more than it is."""


@cache
def magnitudes(form: Fp8Format) -> Numbers:
    """What the codes from 0 on stand for, in their order, up to the largest finite one."""
    exponent_bits, fraction_bits, bias = BITS[form]
    found = []
    for code in range(1 << (exponent_bits + fraction_bits)):
        exponent, fraction = code >> fraction_bits, code % (1 << fraction_bits)
        last = exponent == (1 << exponent_bits) - 1
        if last and (form is E5M2 or fraction == (1 << fraction_bits) - 1):
            break
        if exponent:
            found.append((1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias))
        else:
            found.append(fraction / (1 << fraction_bits) * 2.0 ** (1 - bias))
    return np.array(found)


def rounded(values: Numbers, form: Fp8Format) -> Numbers:
    """The nearest number of the format, of two as near that of an even code; NaN of what is not finite."""
    numbers = magnitudes(form)
    size = np.minimum(np.abs(np.where(np.isfinite(values), values, 0.0)), numbers[-1])
    above = np.clip(np.searchsorted(numbers, size), 1, len(numbers) - 1)
    to_above, to_below = numbers[above] - size, size - numbers[above - 1]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    result = np.copysign(np.where(up, numbers[above], numbers[above - 1]), values)
    return np.where(np.isfinite(values), result, np.nan)


def quantized(values: Numbers, form: Fp8Format, rows: int | None, columns: int | None) -> Numbers:
    """A matrix as it is once more a matrix of numbers: by blocks, scaled by their least powers of two."""
    return by_block(
        values, rows, columns, lambda block: rounded(block / scale(block, form), form) * scale(block, form)
    )


def scale(block: Numbers, form: Fp8Format) -> float:
    """The least power of two by which all of a block is within the format; of zeros one."""
    most = float(np.abs(block).max(initial=0.0))
    power = 2.0**-126
    while most > power * magnitudes(form)[-1]:
        power *= 2
    return power if most else 1.0


def by_block(
    values: Numbers, rows: int | None, columns: int | None, of: Callable[[Numbers], Numbers]
) -> Numbers:
    """What `of` makes of each block of a matrix, put together again."""
    result = np.empty_like(values)
    for top in range(0, values.shape[0], rows or values.shape[0]):
        for left in range(0, values.shape[1], columns or values.shape[1]):
            part = np.s_[top : top + (rows or values.shape[0]), left : left + (columns or values.shape[1])]
            result[part] = of(values[part])
    return result


def decibels(exact: Tensor, found: Tensor, dim: int | None = None) -> Tensor:
    """Ratio of signal to noise, of all or along a dim."""
    signal, noise = exact.double().square(), (found.double() - exact.double()).square()
    return 10 * torch.log10(signal.sum(dim) / noise.sum(dim))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
