"""How differences of weights travel between replicas, and become sums: whole, or in fewer bits.

Each rank codes what it has, every owner of a share decodes what all have sent and adds in fp32, in rank
order, and what the owners code of their sums is what all get, the same bits. Zeros stay zeros. Blocks begin
at each parameter: beside what moves much, what moves little would be lost in every sum. What rounding
loses is not kept for the next time, as in Streaming DiLoCo (arXiv 2501.18512): a replica that takes the
outer weights as they are has no use for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import SequentialWork, Work
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.compression.blocks import CompressionBlocks
from hpctrain.sharding.compression.codecs import Codec, RoundedCodec
from hpctrain.sharding.compression.compressed_reduction import CodedSum


class Halved:
    """Four bits an element, from -7 to 7 times the block's scale, to the nearest; two to a byte."""

    width = BLOCK // 2
    scale = 4

    def encode(self, values: Tensor, counts: Tensor) -> Tensor:  # noqa: ARG002
        """See Codec. The first of two elements is in the lower half."""
        blocks = values.view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / 7
        numbers = (blocks / scales.masked_fill(scales == 0, 1)).round_().add_(8).to(torch.uint8)
        pairs = numbers[:, ::2] | numbers[:, 1::2] << 4
        return torch.cat((pairs.view(-1), scales.view(-1).view(torch.uint8)))

    def decode(self, code: Tensor) -> Tensor:
        """Return the approximate values, fp32 [n BLOCK]. A block that was not finite is not finite again."""
        count = code.numel() // (self.width + self.scale)
        pairs, scales = code.split((count * self.width, count * self.scale))
        numbers = torch.stack((pairs & 15, pairs >> 4), 1).view(count, BLOCK).float()
        return numbers.sub_(8).mul_(scales.view(torch.float32).unsqueeze(1)).view(-1)

    def working_bytes(self, elements: int) -> int:
        """See Codec: quotients, then numbers; or these in two forms."""
        return 8 * elements


FORMATS: Mapping[str, Codec | None] = {
    "fp32": None,
    "bf16": RoundedCodec("bf16"),
    "int8": RoundedCodec("int8"),
    "int4": Halved(),
}
"""The formats of a deck; None is fp32, of which all bits travel."""


def start_sum(group: Group, values: Tensor, lengths: Sequence[int], codec: Codec | None) -> Work[Tensor]:
    """Start to sum `values`, fp32 [n], over the group, in place; `lengths` of them belong together each.

    Less than a block for each rank travels in fp32.
    """
    coded = _coded_sum(group, lengths, codec)
    if coded is None:
        return group.start_all_reduce(values)
    return SequentialWork(coded.operations(values, values), values)


def sum_bytes(group: Group, lengths: Sequence[int], codec: Codec | None) -> int:
    """Memory that the sum of so many values needs while it is under way, or on its way there."""
    coded = _coded_sum(group, lengths, codec)
    if coded is None:
        return group.host.scratch_bytes(sum(lengths), torch.float32.itemsize)
    return coded.scratch_bytes


def _coded_sum(group: Group, lengths: Sequence[int], codec: Codec | None) -> CodedSum | None:
    if codec is None or group.size == 1 or sum(lengths) < group.size * BLOCK:
        return None
    blocks = CompressionBlocks.beside(lengths, group.device)
    return CodedSum(blocks, group, codec, blocks.equal_spans(group.size))
