"""Comparison of the parameters of ranks that should hold the same values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.audit.bits import integers_of
from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError
from hpctrain.memory.scratch import Flat, read_pieces
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.synchronize import exchange_with_other_end

_PIECE = 1 << 18


def check_replicas(buckets: Sequence[Bucket], everyone: Group) -> None:
    """Check that ranks which should hold the same parameters do. Collective over `everyone`.

    It compares wrapping sums of the bits, weighted by position.

    Raises:
        HpctrainError: Parameters differ. It names them, on all ranks.
    """
    by_group: dict[Group, list[tuple[BucketSegment, Flat]]] = {}
    for bucket in buckets:
        for segment, values, _ in bucket.owned_segments(bucket.owned_values):
            replicas = () if bucket.sharding.diverging else (bucket.sharding.replicas,)
            for holders in (segment.replication.holders, *replicas):
                by_group.setdefault(holders, []).append((segment, values))
        if bucket.sharding.zero < 3 and bucket.values is not None:
            of_all = [(segment, segment.view(bucket.values)) for segment in bucket.segments]
            by_group.setdefault(bucket.sharding.group, []).extend(of_all)
    position_sums = PositionSums()
    names = {name for group, parts in by_group.items() for name in _differing(parts, group, position_sums)}
    names.update(_differing_ends(buckets, position_sums))
    differing = sorted({name for rank in everyone.all_gather_object(sorted(names)) for name in rank})
    if differing:
        raise HpctrainError(
            [f"parameter {name} differs between ranks that should hold the same values" for name in differing]
        )


def _differing(
    parts: Sequence[tuple[BucketSegment, Flat]], group: Group, position_sums: PositionSums
) -> list[str]:
    """Return the names of the parameters that differ between ranks of the group."""
    if not parts or group.size == 1:
        return []
    sums = torch.stack([position_sums.of(values) for _, values in parts])
    gathered = group.all_gather(sums.unsqueeze(0))
    return [
        segment.parameter.shard.name
        for index, (segment, _) in enumerate(parts)
        if not bool((gathered[:, index] == gathered[0, index]).all())
    ]


def _differing_ends(buckets: Sequence[Bucket], position_sums: PositionSums) -> Iterator[str]:
    """Yield the names of tied parameters that differ between the first and the last pipeline stage.

    The two stages split them at different places, so the sums over all slices are compared.
    """
    owned = [(bucket, *each) for bucket in buckets for each in bucket.owned_segments(bucket.owned_values)]
    for bucket, segment, values, offset in sorted(owned, key=lambda each: each[1].parameter.shard.name):
        pipeline = segment.replication.tied_pipeline
        if pipeline is not None:
            sums = position_sums.of(values, offset).unsqueeze(0)
            if bucket.sharding.zero > 0:
                sums = bucket.sharding.group.all_gather(sums).sum(0, keepdim=True)
            if not torch.equal(sums, exchange_with_other_end(pipeline, sums)):
                yield segment.parameter.shard.name


class PositionSums:
    """Sums over the bits of values, weighted by position, so that exchanged values are detected.

    It reuses its scratch memory. Otherwise small allocations between long-lived ones would leave gaps that
    the C library cannot return, as large as the model.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def of(self, values: Flat, position: int = 0) -> Tensor:
        """Return the int64 sum, 0-dim, over the bits of `values`, the first of which has this position."""
        if values.device not in self._scratch:
            odd = torch.arange(3, 2 * _PIECE + 3, 2, device=values.device)
            self._scratch[values.device] = odd, torch.empty_like(odd)
        odd, scratch = self._scratch[values.device]
        total = torch.zeros((), dtype=torch.int64, device=values.device)
        for _, read in read_pieces(values):
            for piece in read.reshape(-1).split(_PIECE):
                bits = scratch[: piece.numel()]
                bits.copy_(integers_of(piece))
                # Multiply each word by 2 position + 3, which is odd.
                total += bits.sum() * (2 * position)
                total += bits.mul_(odd[: len(bits)]).sum()
                position += len(bits)
        return total
