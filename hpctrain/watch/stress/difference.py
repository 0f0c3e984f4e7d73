"""Where a result is not what it has to be, to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.audit.bits import integers_of
from hpctrain.text import counted, ranges

_MOST_BITS = 6


@dataclass(frozen=True)
class BitDifference:
    """The first wrong element, by its flat `position`, which of its bits are, and how many elements are."""

    position: int
    found: str
    expected: str
    bits: tuple[int, ...]
    width: int
    count: int

    def __str__(self) -> str:
        """`4098 instead of 4096 (bit 11 of 32 is wrong)`."""
        if len(self.bits) > _MOST_BITS:
            which = f"{len(self.bits)} of {self.width} bits are"
        else:
            several = len(self.bits) > 1
            which = (
                f"bit{'s' * several} {ranges(self.bits, ', ')} of {self.width} {'are' if several else 'is'}"
            )
        others = f"; {counted(self.count, 'element')} in all" if self.count > 1 else ""
        return f"{self.found} instead of {self.expected} ({which} wrong{others})"


def difference(found: Tensor, expected: Tensor) -> BitDifference | None:
    """The first one between tensors of one shape, format and device; None where they are equal. What is not a
    number is wrong; the signs of zeros do not count.
    """
    if torch.equal(found, expected):
        return None
    wrong = (found != expected).flatten().nonzero()
    position = int(wrong[0])
    pair = [each.flatten()[position].cpu() for each in (found, expected)]
    width = 8 * found.itemsize
    one, other = (int(integers_of(each.reshape(1)).item()) for each in pair)
    apart = (one ^ other) & ((1 << width) - 1)
    bits = tuple(bit for bit in range(width) if apart >> bit & 1)
    found_text, expected_text = (_text(each, width) for each in pair)
    return BitDifference(position, found_text, expected_text, bits, width, len(wrong))


def _text(element: Tensor, width: int) -> str:
    if element.dtype.is_floating_point:
        return f"{element.item():.9g}"
    return f"0x{int(element.item()) & ((1 << width) - 1):0{width // 4}x}"
