"""Formats in which replicas exchange differences of weights.

Each rank encodes its values. Each owner of a share decodes what all ranks have sent, adds in fp32 in the
order of ranks, and encodes the sums for all ranks. So all get the same bits, and zeros stay zeros. Blocks
begin at each parameter: otherwise small differences next to large ones would be lost in every sum. Rounding
errors are not kept for the next time, as in Streaming DiLoCo (arXiv 2501.18512), because a replica continues
from the outer weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.comm.work import SequentialWork, Work
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.compression.blocks import CompressionBlocks
from hpctrain.sharding.compression.codecs import Codec, RoundedCodec
from hpctrain.sharding.compression.compressed_reduction import CodedSum


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


FORMATS: Mapping[str, Codec | None] = {
    "fp32": None,
    "bf16": RoundedCodec("bf16"),
    "int8": RoundedCodec("int8"),
    "int4": Int4Codec(),
}
"""Codecs by their names in a deck; None is fp32 without a codec."""


def start_sum(group: Group, values: Tensor, lengths: Sequence[int], codec: Codec | None) -> Work[Tensor]:
    """Start to sum `values`, fp32 [n], over the group in place. Collective.

    Values are summed in fp32 if there is less than one block for each rank.

    Args:
        group: The replicas.
        values: The values.
        lengths: Number of elements of each parameter in `values`.
        codec: Format; None is fp32.
    """
    coded = coded_sum(group, lengths, codec)
    if coded is None:
        return group.start_all_reduce(values)
    return SequentialWork(coded.operations(values, values), values)


def coded_sum(group: Group, lengths: Sequence[int], codec: Codec | None) -> CodedSum | None:
    """Return the CodedSum that `start_sum` uses for values of these lengths; None if it sums in fp32. Local.

    Plans call it to count bytes.

    Args:
        group: The replicas.
        lengths: Number of elements of each parameter.
        codec: Format; None is fp32.
    """
    if codec is None or group.size == 1 or sum(lengths) < group.size * BLOCK:
        return None
    blocks = CompressionBlocks.of_lengths(lengths, group.device)
    return CodedSum(blocks, group, codec, blocks.equal_spans(group.size))
