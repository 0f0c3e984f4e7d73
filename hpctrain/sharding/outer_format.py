"""How differences of weights travel between replicas, and become sums: whole, or in fewer bits.

Each rank codes what it has, every owner of a share decodes what all have sent and adds in fp32, in rank
order, and what the owners code of their sums is what all get, the same bits. Zeros stay zeros. What rounding
loses is not kept for the next time, as in Streaming DiLoCo (arXiv 2501.18512): a replica that takes the
outer weights as they are has no use for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Successive, Work
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.compression.codecs import Codec, Rounded


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
        """See Codec."""
        count = code.numel() // (self.width + self.scale)
        pairs, scales = code.split((count * self.width, count * self.scale))
        numbers = torch.stack((pairs & 15, pairs >> 4), 1).view(count, BLOCK).float()
        return numbers.sub_(8).mul_(scales.view(torch.float32).unsqueeze(1)).view(-1)

    def working_bytes(self, elements: int) -> int:
        """See Codec: quotients, then numbers; or these in two forms."""
        return 8 * elements


FORMATS: Mapping[str, Codec | None] = {
    "fp32": None,
    "bf16": Rounded("bf16"),
    "int8": Rounded("int8"),
    "int4": Halved(),
}
"""The formats of a deck; None is fp32, of which all bits travel."""


def start_sum(group: Group, values: Tensor, codec: Codec | None) -> Work[Tensor]:
    """Start to sum `values`, fp32 [n], over the group, in place.

    What has no block for every rank travels in fp32.
    """
    if not _coded(group, values.numel(), codec):
        return group.start_all_reduce(values)
    assert codec is not None
    return Successive(_sum_of_codes(group, values, codec), values)


def sum_bytes(group: Group, length: int, codec: Codec | None) -> int:
    """Memory that the sum of so many values needs while it is under way, or on its way there."""
    if not _coded(group, length, codec):
        return group.host.scratch_bytes(length, torch.float32.itemsize)
    assert codec is not None
    count = _blocks_of_share(group, length) * group.size
    return count * (2 * (codec.width + codec.scale) + 4 * BLOCK) + codec.working_bytes(count * BLOCK)


def _coded(group: Group, length: int, codec: Codec | None) -> bool:
    return codec is not None and length >= group.size * BLOCK and group.size > 1


def _blocks_of_share(group: Group, length: int) -> int:
    return -(-length // (BLOCK * group.size))


def _sum_of_codes(group: Group, values: Tensor, codec: Codec) -> Iterator[Work[Tensor]]:
    count = _blocks_of_share(group, values.numel())
    counts = torch.full((count,), BLOCK, device=values.device)
    padded = values.new_zeros(count * BLOCK * group.size)
    padded[: values.numel()] = values
    sent = torch.cat([codec.encode(share, counts) for share in padded.chunk(group.size)])
    received = torch.empty_like(sent)
    yield group.start_all_to_all(sent, received)
    total = values.new_zeros(count * BLOCK)
    for code in received.chunk(group.size):
        total.add_(codec.decode(code))
    yield group.start_all_gather(codec.encode(total, counts), sent)
    decoded = torch.cat([codec.decode(code) for code in sent.chunk(group.size)])
    values.copy_(decoded[: values.numel()])
