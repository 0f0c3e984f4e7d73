"""The global gradient norm, which counts every logical element once, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.measured_reduction import square_sum


def local_square_norm(buckets: Sequence[Bucket]) -> Tensor:
    """Sum of squares, fp64 0-dim, of the gradients that this rank counts.

    The ranks that share a bucket count a slice each, whatever they hold besides.
    """
    return square_sum(_counted(buckets), buckets[0].own_gradients.device)


def _counted(buckets: Sequence[Bucket]) -> Iterator[Tensor]:
    """The gradients that this rank counts, by parameter."""
    for bucket in buckets:
        own = bucket.own_gradients
        counted = own if bucket.own == bucket.slice else own[bucket.slice]
        for segment, elements, _ in bucket.cut(counted, bucket.slice):
            if segment.parameter.requires_grad and segment.replication.counted:
                yield elements


def clip_coefficient(norm: float, limit: float) -> float:
    """The factor that brings a gradient of norm `norm` down to `limit`; 1 with limit 0 (off)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
