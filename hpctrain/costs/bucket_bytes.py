"""Bytes of the memory of buckets, and of the state that belongs to their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpctrain.memory.scratch import Flat, storage_bytes
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.state import StateTensor


def value_bytes(buckets: Sequence[Bucket]) -> int:
    """Return the bytes of the parameters that these buckets always hold.

    Of memory that ranks share, each counts an equal part.
    """
    by_sharers: dict[int, list[Flat]] = {}
    for bucket in buckets:
        by_sharers.setdefault(bucket.sharers, []).append(bucket.owned_values)
    return sum(-(-storage_bytes(values) // sharers) for sharers, values in by_sharers.items())


def gradient_bytes(buckets: Sequence[Bucket]) -> int:
    """Return the bytes of the gradients that these buckets always hold."""
    segments = (segment for bucket in buckets for segment in bucket.segments)
    lookups = (each for segment in segments for each in segment.parameter.lookup_gradients)
    return storage_bytes([*(bucket.owned_gradients for bucket in buckets), *lookups])


def pool_bytes(buckets: Iterable[Bucket]) -> int:
    """Return the bytes of the pools of these buckets."""
    return sum(sharding.pool.bytes for sharding in {bucket.sharding for bucket in buckets})


def state_bytes(tensors: Iterable[StateTensor], buckets: Sequence[Bucket]) -> int:
    """Return the bytes of state on the device that computes, without the parameters themselves."""
    devices = {bucket.sharding.group.device for bucket in buckets}
    parameters = [bucket.owned_values for bucket in buckets]
    computing = [tensor.values for tensor in tensors if tensor.values.device in devices]
    return storage_bytes([*computing, *parameters]) - storage_bytes(parameters)
