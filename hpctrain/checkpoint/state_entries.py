"""What a training run stores: parameters and the state that belongs to them, each rank its pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hpctrain.checkpoint.checkpoint_index import StoredTensor
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.state import COMMON, MASTER, MODEL, StateTensor, owned_state

_REPLICAS = "/replicas."
"""What the names begin with of datasets [replicas, ...] of what each has of its own."""


_AS_IT_IS = frozenset({"if stored", "as many", "as a sum"})
"""How state is resumed that stays as it began where a file does not have it."""


def training_entries(state: Iterable[StateTensor], writing: bool = False) -> list[TensorRange]:
    """Entries `/<kind>/<name>` of all state, such as `/model/<name>` and `/optimizer/<state>/<name>`.

    Each rank has its own elements of them; for `writing`, what another stage writes is left out.
    """
    return [_entry(tensor.kind, tensor) for tensor in state if tensor.writes_checkpoint or not writing]


def resumed_entries(
    state: Iterable[StateTensor], stored: Mapping[str, StoredTensor]
) -> tuple[list[TensorRange], set[str]]:
    """What a run reads of a file with the datasets `stored`, and the kinds of which it leaves some as they
    began: the file does not have them in their shape, or the run does not train what they belong to.

    Runs of single and of half precision go on from each other: the parameters of the one are the master
    weights of the other. Parameters of half precision are made from the master weights afterwards.
    """
    entries: list[TensorRange] = []
    left: set[str] = set()
    weights = {
        apart: MASTER if any(name.startswith(_dataset(MASTER, apart, "")) for name in stored) else MODEL
        for apart in (False, True)
    }
    for tensor in state:
        entry = _stored_entry(tensor, stored, weights)
        found = stored.get(entry.dataset)
        if found is not None and found.kind != entry.kind and tensor.resume_mode != "always":
            found = None
        if found is None and (whole := _whole(tensor, entry, stored)) is not None:
            entries += [whole] if tensor.shard.start[0] == 0 else []
        elif tensor.resume_mode == "as a sum" and found is not None and found.shape[1:] == entry.shape[1:]:
            entries += _summed(entry, found.shape[0])
        elif tensor.resume_mode == "as many" and found is not None and len(found.shape) == 1:
            entries.append(_as_many(entry, found.shape[0]))
        elif tensor.resume_mode in _AS_IT_IS and (found is None or found.shape != entry.shape):
            left.add(tensor.kind)
        elif tensor.resume_mode != "never":
            entries.append(entry)
        elif tensor.kind != MODEL:
            left.add(tensor.kind)
    return entries, left


def stored_replicas(stored: Mapping[str, StoredTensor]) -> int:
    """How many replicas a file has state of, each its own; none where they were not apart."""
    return next((each.shape[0] for name, each in stored.items() if name.startswith(_REPLICAS)), 0)


def _stored_entry(
    tensor: StateTensor, stored: Mapping[str, StoredTensor], weights: Mapping[bool, str]
) -> TensorRange:
    """What a file has for a tensor; `weights` is the kind of what is updated, of replicas and of others.

    Another number of replicas is taken in turns. Replicas begin with what all have in common where the file
    has no others, and the other way round with the first one's.
    """
    plain = tensor.shard.unstacked if tensor.per_replica else tensor.shard
    for per_replica in (tensor.per_replica, not tensor.per_replica):
        kind = weights[per_replica] if tensor.is_weight else tensor.kind
        found = stored.get(_dataset(kind, per_replica, plain.name))
        if found is None:
            continue
        shard = plain
        if per_replica and tensor.resume_mode == "as a sum":
            shard = tensor.shard
        elif per_replica:
            count = found.shape[0]
            shard = plain.stacked(tensor.shard.start[0] % count if tensor.per_replica else 0, count)
        return replace(_entry(kind, tensor), dataset=found.dataset, shard=shard)
    return _entry(tensor.kind, tensor)


def _whole(tensor: StateTensor, entry: TensorRange, stored: Mapping[str, StoredTensor]) -> TensorRange | None:
    """What a file has of the kind that a sum is made of, for the first of all ranks to begin with."""
    found = (
        stored.get(_dataset(tensor.fallback_kind, False, tensor.shard.name)) if tensor.fallback_kind else None
    )
    if found is None or found.shape != entry.shape[1:]:
        return None
    return replace(entry, dataset=found.dataset, shard=tensor.shard.unstacked)


def model_entries(buckets: Sequence[Bucket]) -> list[TensorRange]:
    """Entries `/model/<name>` alone, for reading a model without its training state."""
    return training_entries(
        tensor for bucket in buckets for tensor in owned_state(MODEL, bucket.owned_values, bucket, COMMON)
    )


def master_entries(state: Iterable[StateTensor]) -> list[TensorRange]:
    """Entries `/model/<name>` of the fp32 weights that the optimizer updates, whatever the precision."""
    entries = ((tensor, _entry(MODEL, tensor)) for tensor in state if tensor.is_weight)
    return [
        replace(entry, dataset=_dataset(MODEL, False, entry.shard.name), shard=entry.shard.unstacked)
        if tensor.per_replica
        else entry
        for tensor, entry in entries
    ]


def _summed(entry: TensorRange, count: int) -> Iterator[TensorRange]:
    """What goes to this rank of what each of `count` ranks had, all of it to one: perhaps nothing."""
    shard = entry.shard
    for number in range(shard.start[0], count, shard.shape[0]):
        theirs = replace(shard, shape=(count, *shard.shape[1:]), start=(number, *shard.start[1:]))
        yield replace(entry, shard=theirs, added=number != shard.start[0])


def _as_many(entry: TensorRange, count: int) -> TensorRange:
    """The first of a row of `count` numbers, of which every rank has a whole one: those there is room for."""
    size = min(count, entry.values.numel())
    return replace(
        entry, shard=replace(entry.shard, shape=(count,), local=(size,)), values=entry.values[:size]
    )


def _entry(kind: str, tensor: StateTensor) -> TensorRange:
    dataset = _dataset(kind, tensor.per_replica, tensor.shard.name)
    return TensorRange(
        dataset, tensor.shard, tensor.values, tensor.offset, *tensor.holder_position, tensor.changes_in_step
    )


def _dataset(kind: str, per_replica: bool, name: str) -> str:
    return f"{_REPLICAS if per_replica else '/'}{kind}/{name}"
