"""What replicas, the ranks that hold the same slices in hybrid sharding, do with each other, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hpctrain.sharding.bucket import Bucket


class Outer(Protocol):
    """Keeps the replicas together."""

    def before_update(self, buckets: Sequence[Bucket]) -> None:
        """The gradients of a step are summed over each bucket's own group. Collective over the replicas."""


class EveryStep:
    """Replicas sum their gradients in every step, so that they never differ."""

    def before_update(self, buckets: Sequence[Bucket]) -> None:
        """Sum the slices."""
        for bucket in buckets:
            if bucket.sharding.replicas.size > 1:
                bucket.sharding.replicas.all_reduce(bucket.own_gradients)
