"""Codecs, which encode blocks of BLOCK elements of gradients or weights in 16, 8, 4 or 1 bits per element."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.memory.compress import BLOCK, compress, expand

_TO_BITS = 0x0102040810204080
"""Factor that moves the bit of byte i of eight bytes of 0 or 1 to the bit 56 + i."""

_TO_BYTES = 0x0101010101010101
"""Factor that copies a byte into all eight bytes."""
_BIT_OF_BYTE = 0x8040201008040201 - 2**64
"""Mask of bit i in byte i."""


class Codec(Protocol):
    """Encoding of n blocks as bytes: first `width` bytes of each block, then `scale` bytes of each block.

    Attributes:
        width: Number of bytes of a block's values.
        scale: Number of bytes of a block's scale.
    """

    width: int
    scale: int

    def encode(self, values: Tensor, counts: Tensor) -> Tensor:
        """Return the code, uint8 [n (width + scale)], of `values`, fp32 [n BLOCK].

        Args:
            values: The values. Elements beyond the counts are zero.
            counts: Number of elements of each block, [n].
        """

    def decode(self, code: Tensor) -> Tensor:
        """Return the approximate values, fp32 [n BLOCK]. A block that was not finite is not finite again."""


class RoundedCodec(Codec):
    """Codec that rounds to bf16, or to int8 with a scale for each block, like activations that are stored."""

    def __init__(self, form: Literal["bf16", "int8"]) -> None:
        self.form = form
        self.width, self.scale = (2 * BLOCK, 0) if form == "bf16" else (BLOCK, 4)

    @override
    def encode(self, values: Tensor, counts: Tensor) -> Tensor:
        return compress(values, self.form)

    @override
    def decode(self, code: Tensor) -> Tensor:
        elements = code.numel() // (self.width + self.scale) * BLOCK
        return expand(code, self.form, elements, torch.float32)


class Int4Codec(Codec):
    """Codec with four bits per element: -7 to 7 times the block's scale, two to a byte."""

    width = BLOCK // 2
    scale = 4

    @override
    def encode(self, values: Tensor, counts: Tensor) -> Tensor:
        blocks = values.view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / 7
        numbers = (blocks / scales.masked_fill(scales == 0, 1)).round_().add_(8).to(torch.uint8)
        # The first of two elements is in the lower half of a byte.
        pairs = numbers[:, ::2] | numbers[:, 1::2] << 4
        return torch.cat((pairs.view(-1), scales.view(-1).view(torch.uint8)))

    @override
    def decode(self, code: Tensor) -> Tensor:
        count = code.numel() // (self.width + self.scale)
        pairs, scales = code.split((count * self.width, count * self.scale))
        numbers = torch.stack((pairs & 15, pairs >> 4), 1).view(count, BLOCK).float()
        return numbers.sub_(8).mul_(scales.view(torch.float32).unsqueeze(1)).view(-1)


class SignCodec(Codec):
    """Codec with one bit per element, which is the block's scale or minus that.

    The scale is the mean of the magnitudes. This minimizes the squared error, which is at most sqrt(1 -
    1/BLOCK) of the block's norm (arXiv 1901.09847, lemma 8), so that errors with feedback remain bounded.
    Zero counts as positive.
    """

    width = BLOCK // 8
    scale = 4

    @override
    def encode(self, values: Tensor, counts: Tensor) -> Tensor:
        rows = values.view(-1, BLOCK)
        return pack_signs(rows >= 0, rows.abs().sum(1) / counts)

    @override
    def decode(self, code: Tensor) -> Tensor:
        return sign_values(*unpack_signs(code)).view(-1)


def sign_values(positive: Tensor, scales: Tensor) -> Tensor:
    """Return, for each sign, plus or minus the scale of its block, fp32 [n, BLOCK].

    Args:
        positive: The signs, bool [n, BLOCK].
        scales: Magnitude of the elements of each block, [n].
    """
    each = scales.unsqueeze(1)
    return positive.to(torch.float32).mul_(2 * each).sub_(each)  # five times as fast as `where`


def pack_signs(positive: Tensor, scales: Tensor) -> Tensor:
    """Return the code of `positive` [n, BLOCK] bool and `scales` [n] fp32.

    It has one bit per sign, then the scales.
    """
    eights = positive.view(-1).view(torch.uint8).view(torch.int64)
    bits = ((eights * _TO_BITS) >> 56).to(torch.uint8)
    return torch.cat((bits, scales.view(torch.uint8)))


def unpack_signs(code: Tensor) -> tuple[Tensor, Tensor]:
    """Return `positive` and `scales` of a code of `pack_signs`."""
    count = code.numel() // (BLOCK // 8 + 4)
    bits, scales = code.split((count * BLOCK // 8, count * 4))
    eights = (bits.to(torch.int64) * _TO_BYTES) & _BIT_OF_BYTE
    return eights.view(torch.uint8).view(count, BLOCK) != 0, scales.view(torch.float32)
