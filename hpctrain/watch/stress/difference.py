"""Bits in which a result differs from the expected one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.audit.bits import integers_of
from hpctrain.text import counted, ranges

_MOST_BITS = 6


@dataclass(frozen=True)
class BitDifference:
    """First wrong element of a result.

    Attributes:
        position: Flat index of the element.
        actual: Its value as text.
        expected: The expected value as text.
        bits: Numbers of the wrong bits, from 0.
        width: Number of bits of an element.
        count: Number of all wrong elements.
    """

    position: int
    actual: str
    expected: str
    bits: tuple[int, ...]
    width: int
    count: int

    def __str__(self) -> str:
        """Return a text such as `4098 instead of 4096 (bit 11 of 32 is wrong)`."""
        if len(self.bits) > _MOST_BITS:
            which = f"{len(self.bits)} of {self.width} bits are"
        else:
            several = len(self.bits) > 1
            which = (
                f"bit{'s' * several} {ranges(self.bits, ', ')} of {self.width} {'are' if several else 'is'}"
            )
        others = f"; {counted(self.count, 'element')} in all" if self.count > 1 else ""
        return f"{self.actual} instead of {self.expected} ({which} wrong{others})"


def difference(actual: Tensor, expected: Tensor) -> BitDifference | None:
    """Return the first difference between tensors of one shape, dtype and device; None if they are equal.

    NaN counts as wrong. Zeros of different signs are equal.
    """
    if torch.equal(actual, expected):
        return None
    wrong = (actual != expected).flatten().nonzero()
    position = int(wrong[0])
    pair = [each.flatten()[position].cpu() for each in (actual, expected)]
    width = 8 * actual.itemsize
    one, other = (int(integers_of(each.reshape(1)).item()) for each in pair)
    changed_bits = (one ^ other) & ((1 << width) - 1)
    bits = tuple(bit for bit in range(width) if changed_bits >> bit & 1)
    actual_text, expected_text = (_text(each, width) for each in pair)
    return BitDifference(position, actual_text, expected_text, bits, width, len(wrong))


def _text(element: Tensor, width: int) -> str:
    if element.dtype.is_floating_point:
        return f"{element.item():.9g}"
    return f"0x{int(element.item()) & ((1 << width) - 1):0{width // 4}x}"
