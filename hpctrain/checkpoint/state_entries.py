"""Entries of checkpoints: parameters and states that belong to them, each as ranges of this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hpctrain.checkpoint.checkpoint_index import StoredTensor
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.state import COMMON, MASTER, MODEL, StateTensor, owned_state

_REPLICAS = "/replicas."
"""Prefix of datasets [replicas, ...], which have a state of each replica."""


_OPTIONAL_MODES = frozenset({"if stored", "as many", "as a sum"})
"""Resume modes of states that keep their initial values if a file does not have them."""


def training_entries(state: Iterable[StateTensor], writing: bool = False) -> list[TensorRange]:
    """Return the entries of states, such as `/model/<name>` and `/optimizer/<state>/<name>`.

    Args:
        state: State tensors of this rank.
        writing: True to leave out tensors that another pipeline stage writes.
    """
    return [_entry(tensor.kind, tensor) for tensor in state if tensor.writes_checkpoint or not writing]


def resumed_entries(
    state: Iterable[StateTensor], stored: Mapping[str, StoredTensor]
) -> tuple[list[TensorRange], set[str]]:
    """Return the entries that a run reads from a file, and the kinds of states that keep initial values.

    States keep their initial values if the file does not have them in their shape, or if the run does not
    train their parameters. A run in fp32 can resume a run in 16 bits and the other way round: the parameters
    of the one are the master weights of the other. The caller computes 16-bit parameters from these.

    Args:
        state: State tensors of this rank.
        stored: Datasets of the file by name.
    """
    entries: list[TensorRange] = []
    left: set[str] = set()
    weights = {
        per_replica: MASTER
        if any(name.startswith(_dataset(MASTER, per_replica, "")) for name in stored)
        else MODEL
        for per_replica in (False, True)
    }
    for tensor in state:
        entry = _stored_entry(tensor, stored, weights)
        dataset = stored.get(entry.dataset)
        if dataset is not None and dataset.kind != entry.kind and tensor.resume_mode != "always":
            dataset = None
        if dataset is None and (fallback := _fallback_entry(tensor, entry, stored)) is not None:
            entries += [fallback] if tensor.shard.start[0] == 0 else []
        elif (
            tensor.resume_mode == "as a sum" and dataset is not None and dataset.shape[1:] == entry.shape[1:]
        ):
            entries += _summed_entries(entry, dataset.shape[0])
        elif tensor.resume_mode == "as many" and dataset is not None and len(dataset.shape) == 1:
            entries.append(_truncated_entry(entry, dataset.shape[0]))
        elif tensor.resume_mode in _OPTIONAL_MODES and (dataset is None or dataset.shape != entry.shape):
            left.add(tensor.kind)
        elif tensor.resume_mode != "never":
            entries.append(entry)
        elif tensor.kind != MODEL:
            left.add(tensor.kind)
    return entries, left


def stored_replicas(stored: Mapping[str, StoredTensor]) -> int:
    """Return the number of replicas whose states a file has; 0 if all replicas had the same state."""
    return next((each.shape[0] for name, each in stored.items() if name.startswith(_REPLICAS)), 0)


def _stored_entry(
    tensor: StateTensor, stored: Mapping[str, StoredTensor], weights: Mapping[bool, str]
) -> TensorRange:
    """Return the entry of a file from which a state tensor is read.

    If the number of replicas differs, replica n reads that with the number n modulo the number in the file.
    If the file has no states of replicas, all read the common one. A run without replicas reads the first
    one.

    Args:
        tensor: The state tensor.
        stored: Datasets of the file by name.
        weights: Kind of the weights that the optimizer updates, for states of replicas and for others.
    """
    plain = tensor.shard.unstacked if tensor.per_replica else tensor.shard
    for per_replica in (tensor.per_replica, not tensor.per_replica):
        kind = weights[per_replica] if tensor.is_weight else tensor.kind
        dataset = stored.get(_dataset(kind, per_replica, plain.name))
        if dataset is None:
            continue
        shard = plain
        if per_replica and tensor.resume_mode == "as a sum":
            shard = tensor.shard
        elif per_replica:
            count = dataset.shape[0]
            shard = plain.stacked(tensor.shard.start[0] % count if tensor.per_replica else 0, count)
        return replace(_entry(kind, tensor), dataset=dataset.dataset, shard=shard)
    return _entry(tensor.kind, tensor)


def _fallback_entry(
    tensor: StateTensor, entry: TensorRange, stored: Mapping[str, StoredTensor]
) -> TensorRange | None:
    """Return the entry of a file's `fallback_kind`, which the first rank reads as its part of a sum."""
    dataset = (
        stored.get(_dataset(tensor.fallback_kind, False, tensor.shard.name)) if tensor.fallback_kind else None
    )
    if dataset is None or dataset.shape != entry.shape[1:]:
        return None
    return replace(entry, dataset=dataset.dataset, shard=tensor.shard.unstacked)


def model_entries(buckets: Sequence[Bucket]) -> list[TensorRange]:
    """Return the entries `/model/<name>` alone, to read a model without its training state."""
    return training_entries(
        tensor for bucket in buckets for tensor in owned_state(MODEL, bucket.owned_values, bucket, COMMON)
    )


def master_entries(state: Iterable[StateTensor]) -> list[TensorRange]:
    """Return entries `/model/<name>` of the fp32 weights that the optimizer updates, in any precision."""
    entries = ((tensor, _entry(MODEL, tensor)) for tensor in state if tensor.is_weight)
    return [
        replace(entry, dataset=_dataset(MODEL, False, entry.shard.name), shard=entry.shard.unstacked)
        if tensor.per_replica
        else entry
        for tensor, entry in entries
    ]


def _summed_entries(entry: TensorRange, count: int) -> Iterator[TensorRange]:
    """Yield the entries of `count` ranks in a file whose values this rank adds, if there are any."""
    shard = entry.shard
    for number in range(shard.start[0], count, shard.shape[0]):
        stored_shard = replace(shard, shape=(count, *shard.shape[1:]), start=(number, *shard.start[1:]))
        yield replace(entry, shard=stored_shard, added=number != shard.start[0])


def _truncated_entry(entry: TensorRange, count: int) -> TensorRange:
    """Return the entry of the first of `count` stored numbers that fit into a vector of each rank."""
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
