"""What a training run stores: parameters and the state that belongs to them, each rank its pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from hpctrain.checkpoint.layout import Entry
from hpctrain.memory.scratch import Flat
from hpctrain.optim.optimizer import MASTER, State
from hpctrain.sharding.bucket import Bucket


def training_entries(
    buckets: Sequence[Bucket], states: Sequence[State], writing: bool = False
) -> list[Entry]:
    """Entries `/model/<name>`, `/master/<name>` (half precision only) and `/optimizer/<state>/<name>`.

    Each rank has its own elements of them; for `writing`, what another stage writes is left out.
    """
    entries: list[Entry] = []
    for bucket, state in zip(buckets, states, strict=True):
        if bucket.dtype == torch.float32:
            # In single precision the master weights, wherever they are, are the parameters.
            flats = _by_folder(state, "/model")
        else:
            flats = {"/model": bucket.own_values} | _by_folder(state, "/master")
        for folder, flat in flats.items():
            entries += _entries(folder, flat, bucket, writing)
    return entries


def resumed_entries(
    buckets: Sequence[Bucket], states: Sequence[State], stored: Collection[str]
) -> list[Entry]:
    """What a run reads of a file with the datasets `stored`: master weights and other state.

    Runs of single and of half precision go on from each other: the parameters of the one are the master
    weights of the other. The parameters themselves are made from the master weights afterwards.
    """
    master = "/master" if any(name.startswith("/master/") for name in stored) else "/model"
    return [
        entry
        for bucket, state in zip(buckets, states, strict=True)
        for folder, flat in _by_folder(state, master).items()
        for entry in _entries(folder, flat, bucket)
    ]


def _by_folder(state: State, master: str) -> dict[str, Flat]:
    """By the folder where each goes, the master weights to `master`."""
    return {master if name == MASTER else f"/optimizer/{name}": flat for name, flat in state.items()}


def model_entries(buckets: Sequence[Bucket]) -> list[Entry]:
    """Entries `/model/<name>` alone, for reading a model without its training state."""
    return [entry for bucket in buckets for entry in _entries("/model", bucket.own_values, bucket)]


def master_entries(buckets: Sequence[Bucket], states: Sequence[State]) -> list[Entry]:
    """Entries `/model/<name>` of the fp32 weights that the optimizer updates, whatever the precision."""
    return [
        entry
        for bucket, state in zip(buckets, states, strict=True)
        for entry in _entries("/model", state[MASTER], bucket)
    ]


def _entries(folder: str, flat: Flat, bucket: Bucket, writing: bool = False) -> Iterator[Entry]:
    """Entries of the bucket's own elements, in `flat`."""
    for segment, values, offset in bucket.owned(flat):
        if segment.replication.written or not writing:
            shard = segment.parameter.shard
            yield Entry(f"{folder}/{shard.name}", shard, values, offset, *segment.replication.copy)
