"""Codes of gradients: blocks of BLOCK elements in 16, 8 or 1 bit an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from hpctrain.memory.compress import BLOCK, compress, compress_peak, expand

_TO_BITS = 0x0102040810204080
"""Times eight bytes of 0 or 1, it has the bit of byte i at place 56 + i."""

_TO_BYTES = 0x0101010101010101
_BIT_OF_BYTE = 0x8040201008040201 - 2**64
"""Times a byte, it has that byte in all eight; of byte i, the bit i."""


class Codec(Protocol):
    """Encoding of n blocks as bytes: first `width` bytes of each block, then `scale` bytes of each block."""

    @property
    def width(self) -> int:
        """Number of bytes of a block's values."""

    @property
    def scale(self) -> int:
        """Number of bytes of a block's scale."""

    def encode(self, values: Tensor, counts: Tensor) -> Tensor:
        """Return the code, uint8 [n (width + scale)], of `values`, fp32 [n BLOCK].

        Args:
            values: The values. Elements beyond the counts are zero.
            counts: Number of elements of each block, [n].
        """

    def decode(self, code: Tensor) -> Tensor:
        """Return the approximate values, fp32 [n BLOCK]. A block that was not finite is not finite again."""

    def working_bytes(self, elements: int) -> int:
        """Return the largest amount of memory that encoding or decoding so many elements takes, in bytes."""


@dataclass(frozen=True)
class RoundedCodec:
    """bf16, or int8 with a scale for each block, to the nearest, as activations that are kept."""

    form: Literal["bf16", "int8"]

    @property
    def width(self) -> int:
        """Number of bytes of a block's values."""
        return 2 * BLOCK if self.form == "bf16" else BLOCK

    @property
    def scale(self) -> int:
        """Number of bytes of a block's scale."""
        return 0 if self.form == "bf16" else 4

    def encode(self, values: Tensor, counts: Tensor) -> Tensor:  # noqa: ARG002
        """Return the code, uint8 [n (width + scale)], of `values`, fp32 [n BLOCK]."""
        return compress(values, self.form)

    def decode(self, code: Tensor) -> Tensor:
        """Return the approximate values, fp32 [n BLOCK]. A block that was not finite is not finite again."""
        elements = code.numel() // (self.width + self.scale) * BLOCK
        return expand(code, self.form, elements, torch.float32)

    def working_bytes(self, elements: int) -> int:
        """Return the largest amount of memory that encoding or decoding so many elements takes, in bytes."""
        return max(compress_peak(elements, 4, self.form), (4 if self.form == "bf16" else 8) * elements)


@dataclass(frozen=True)
class Sign:
    """One bit an element, which is the block's scale or minus that: the mean of its magnitudes.

    Of all numbers that leaves the least squared error, and at most sqrt(1 - 1/BLOCK) of the block's norm
    (arXiv 1901.09847, lemma 8), so that errors that are fed back stay bounded. Zero is not negative.
    """

    width = BLOCK // 8
    scale = 4

    def encode(self, values: Tensor, counts: Tensor) -> Tensor:
        """Return the code, uint8 [n (width + scale)], of `values`, fp32 [n BLOCK]."""
        rows = values.view(-1, BLOCK)
        return signs(rows >= 0, rows.abs().sum(1) / counts)

    def decode(self, code: Tensor) -> Tensor:
        """Return the approximate values, fp32 [n BLOCK]. A block that was not finite is not finite again."""
        return signed(*of_signs(code)).view(-1)

    def working_bytes(self, elements: int) -> int:
        """Return the largest amount of memory that encoding or decoding so many elements takes, in bytes."""
        return 4 * elements + 3 * elements  # values, and on their way bytes and eighths of int64


def signed(positive: Tensor, scales: Tensor) -> Tensor:
    """Of blocks of signs the values [n, BLOCK] fp32: `scales` [n] where `positive`, minus these elsewhere."""
    each = scales.unsqueeze(1)
    return positive.to(torch.float32).mul_(2 * each).sub_(each)  # in a fifth of the time that `where` takes


def signs(positive: Tensor, scales: Tensor) -> Tensor:
    """The code of blocks of signs: bits of `positive` [n, BLOCK] bool, and `scales` [n] fp32."""
    eights = positive.view(-1).view(torch.uint8).view(torch.int64)
    bits = ((eights * _TO_BITS) >> 56).to(torch.uint8)
    return torch.cat((bits, scales.view(torch.uint8)))


def of_signs(code: Tensor) -> tuple[Tensor, Tensor]:
    """`positive` and `scales` of a code of signs."""
    count = code.numel() // (BLOCK // 8 + 4)
    bits, scales = code.split((count * BLOCK // 8, count * 4))
    eights = (bits.to(torch.int64) * _TO_BYTES) & _BIT_OF_BYTE
    return eights.view(torch.uint8).view(count, BLOCK) != 0, scales.view(torch.float32)
