"""What a training run stores: parameters, master weights and moments, each rank its pieces."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpctrain.checkpoint.layout import Entry
from hpctrain.comm.mesh import Mesh
from hpctrain.optim.adamw import Moments
from hpctrain.parallel.shard import Shard
from hpctrain.sharding.bucket import Bucket


def training_entries(buckets: Sequence[Bucket], moments: Sequence[Moments], mesh: Mesh) -> list[Entry]:
    """Entries `/model/<name>`, `/master/<name>` (half precision only) and `/optimizer/<moment>/<name>`."""
    entries = []
    for bucket, moment in zip(buckets, moments, strict=True):
        flats: dict[str, Tensor] = {
            "/model": bucket.values,
            "/optimizer/exp_avg": moment.exp_avg,
            "/optimizer/exp_avg_sq": moment.exp_avg_sq,
        }
        if moment.master is not bucket.values:
            flats["/master"] = moment.master
        for segment in bucket.segments:
            shard = segment.parameter.shard
            copy, copies = replica(shard, bucket.group.rank, bucket.group.size, mesh)
            for place, flat in flats.items():
                values = flat[segment.start : segment.start + segment.length]
                entries.append(Entry(f"{place}/{shard.name}", shard, values, copy=copy, copies=copies))
    return entries


def model_entries(buckets: Sequence[Bucket], mesh: Mesh) -> list[Entry]:
    """Entries `/model/<name>` alone, for reading a model without its training state."""
    return [
        Entry(
            f"/model/{segment.parameter.shard.name}",
            segment.parameter.shard,
            bucket.values[segment.start : segment.start + segment.length],
            0,
            *replica(segment.parameter.shard, bucket.group.rank, bucket.group.size, mesh),
        )
        for bucket in buckets
        for segment in bucket.segments
    ]


def replica(shard: Shard, data_rank: int, data_ranks: int, mesh: Mesh) -> tuple[int, int]:
    """(number of this copy, copies) of a piece over the data x context, tensor and pipeline axes."""
    if "tensor" in shard.split:
        copy, copies = shard.copy, shard.copies
    else:
        copy, copies = mesh.coordinate("tensor"), mesh.size("tensor")
    within = data_ranks * copies
    return shard.stage_copy * within + data_rank * copies + copy, shard.stage_copies * within
