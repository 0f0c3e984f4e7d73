"""What a training run stores: parameters, master weights and moments, each rank its pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from hpctrain.checkpoint.layout import Entry
from hpctrain.memory.scratch import Flat
from hpctrain.optim.adamw import Moments
from hpctrain.sharding.bucket import Bucket


def training_entries(
    buckets: Sequence[Bucket], moments: Sequence[Moments[Flat]], writing: bool = False
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
            entries += _entries(place, flat, bucket, writing)
    return entries


def resumed_entries(
    buckets: Sequence[Bucket], moments: Sequence[Moments[Flat]], stored: Collection[str]
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
            entries += _entries(place, flat, bucket)
    return entries


def _moment_places(moment: Moments[Flat]) -> dict[str, Flat]:
    return {"/optimizer/exp_avg": moment.exp_avg, "/optimizer/exp_avg_sq": moment.exp_avg_sq}


def model_entries(buckets: Sequence[Bucket]) -> list[Entry]:
    """Entries `/model/<name>` alone, for reading a model without its training state."""
    return [entry for bucket in buckets for entry in _entries("/model", bucket.own_values, bucket)]


def master_entries(buckets: Sequence[Bucket], moments: Sequence[Moments[Flat]]) -> list[Entry]:
    """Entries `/model/<name>` of the fp32 weights that the optimizer updates, whatever the precision."""
    return [
        entry
        for bucket, moment in zip(buckets, moments, strict=True)
        for entry in _entries("/model", moment.master, bucket)
    ]


def _entries(place: str, flat: Flat, bucket: Bucket, writing: bool = False) -> Iterator[Entry]:
    """Entries of the bucket's own elements, in `flat`."""
    for segment, values, offset in bucket.owned(flat):
        if segment.replication.written or not writing:
            shard = segment.parameter.shard
            yield Entry(f"{place}/{shard.name}", shard, values, offset, *segment.replication.copy)
