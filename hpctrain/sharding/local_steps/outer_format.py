"""Formats in which replicas exchange differences of weights.

Each rank encodes its values. Each owner of a share decodes what all ranks have sent, adds in fp32 in the
order of ranks, and encodes the sums for all ranks. So all get the same bits, and zeros stay zeros. Blocks
begin at each parameter: otherwise small differences next to large ones would be lost in every sum. Rounding
errors are not kept for the next time, as in Streaming DiLoCo (arXiv 2501.18512), because a replica continues
from the outer weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import SequentialWork, Work
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.compression.blocks import CompressionBlocks
from hpctrain.sharding.compression.codecs import Codec, Int4Codec, RoundedCodec
from hpctrain.sharding.compression.compressed_reduction import CodedSum

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
