"""Squared gradient norm of this rank's elements, each counted on one rank, and the clip coefficient.

`train/step.py` adds the parts of all ranks, together with their losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.gradient_squares import square_sum


def local_square_norm(buckets: Sequence[Bucket]) -> Tensor:
    """Return the sum of squares of the gradients that this rank counts, as an fp64 scalar tensor.

    Each rank that shares a bucket counts one slice of it, even if it holds all of its gradients. So the sum
    over all ranks counts each element once. Local.
    """
    return square_sum(_gradients_in_norm(buckets), buckets[0].owned_gradients.device)


def _gradients_in_norm(buckets: Sequence[Bucket]) -> Iterator[Tensor]:
    """Yield the gradients that this rank adds to the norm, by parameter."""
    for bucket in buckets:
        gradients = bucket.owned_gradients
        values = gradients if bucket.owned_slice == bucket.slice else gradients[bucket.slice]
        for segment, elements, _ in bucket.segments_within(values, bucket.slice):
            if segment.parameter.requires_grad and segment.replication.counts_slice:
                yield elements


def clip_coefficient(norm: float, limit: float) -> float:
    """Return the factor that reduces a gradient of norm `norm` to `limit`; 1 if limit is 0 (off)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
