"""What a training run stores: parameters, master weights and moments, each rank its pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from hpctrain.checkpoint.layout import Entry
from hpctrain.comm.mesh import Mesh
from hpctrain.memory.scratch import Flat
from hpctrain.optim.adamw import Moments
from hpctrain.parallel.shard import Shard
from hpctrain.sharding.bucket import Bucket


def training_entries(
    buckets: Sequence[Bucket], moments: Sequence[Moments[Flat]], mesh: Mesh, writing: bool = False
) -> list[Entry]:
    """Entries `/model/<name>`, `/master/<name>` (half precision only) and `/optimizer/<moment>/<name>`.

    Each rank has its own elements of them; for `writing`, what another stage writes is left out.
    """
    entries: list[Entry] = []
    for bucket, moment in zip(buckets, moments, strict=True):
        if bucket.dtype == torch.float32:
            # In single precision the master weights, wherever they are, are the parameters.
            flats: dict[str, Flat] = {"/model": moment.master}
        else:
            flats = {"/model": bucket.own_values, "/master": moment.master}
        for place, flat in (flats | _moment_places(moment)).items():
            entries += _entries(place, flat, bucket, mesh, writing)
    return entries


def resumed_entries(
    buckets: Sequence[Bucket], moments: Sequence[Moments[Flat]], mesh: Mesh, stored: Collection[str]
) -> list[Entry]:
    """What a run reads of a file with the datasets `stored`: master weights and moments.

    Runs of single and of half precision go on from each other: the parameters of the one are the master
    weights of the other. The parameters themselves are made from the master weights afterwards.
    """
    half = any(name.startswith("/master/") for name in stored)
    entries: list[Entry] = []
    for bucket, moment in zip(buckets, moments, strict=True):
        flats = {"/master" if half else "/model": moment.master} | _moment_places(moment)
        for place, flat in flats.items():
            entries += _entries(place, flat, bucket, mesh, False)
    return entries


def _moment_places(moment: Moments[Flat]) -> dict[str, Flat]:
    return {"/optimizer/exp_avg": moment.exp_avg, "/optimizer/exp_avg_sq": moment.exp_avg_sq}


def model_entries(buckets: Sequence[Bucket], mesh: Mesh) -> list[Entry]:
    """Entries `/model/<name>` alone, for reading a model without its training state."""
    return [
        entry for bucket in buckets for entry in _entries("/model", bucket.own_values, bucket, mesh, False)
    ]


def master_entries(buckets: Sequence[Bucket], moments: Sequence[Moments[Flat]], mesh: Mesh) -> list[Entry]:
    """Entries `/model/<name>` of the fp32 weights that the optimizer updates, whatever the precision."""
    return [
        entry
        for bucket, moment in zip(buckets, moments, strict=True)
        for entry in _entries("/model", moment.master, bucket, mesh, False)
    ]


def _entries(place: str, flat: Flat, bucket: Bucket, mesh: Mesh, writing: bool) -> Iterator[Entry]:
    """Entries of the bucket's own elements, in `flat`.

    Tied embeddings lie on two stages. Where they are whole there, they are copies of each other; slices are
    cut in other places on the two, so that the first stage's alone are written.
    """
    sharding = bucket.sharding
    whole = sharding.stage == 0
    copy_holders = sharding.group if whole else sharding.replicas
    for segment, values, offset in bucket.owned(flat):
        shard = segment.parameter.shard
        if writing and not whole and shard.stage_copy > 0:
            continue
        copy, copies = replica(shard, copy_holders.rank, copy_holders.size, mesh, over_stages=whole)
        yield Entry(f"{place}/{shard.name}", shard, values, offset, copy, copies)


def replica(
    shard: Shard, data_rank: int, data_ranks: int, mesh: Mesh, over_stages: bool = True
) -> tuple[int, int]:
    """(number of this copy, copies) of a piece that `data_ranks` hold, over the tensor axis too, and over the
    pipeline's if `over_stages`.
    """
    if "tensor" in shard.split:
        copy, copies = shard.copy, shard.copies
    else:
        copy, copies = mesh.coordinate("tensor"), mesh.size("tensor")
    within = data_ranks * copies
    stage, stages = (shard.stage_copy, shard.stage_copies) if over_stages else (0, 1)
    return stage * within + data_rank * copies + copy, stages * within
