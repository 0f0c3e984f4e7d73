"""Check that reduced gradients do not change in memory between the reduction and the update.

A bucket is reduced while the backward pass of others continues, and a slice may be the sum of several
reductions. So fingerprints are taken as soon as sums exist, and compared before anything is added to them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpctrain.audit.bits import word_sum
from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.synchronize import GradientSynchronizer


class ReducedGradients:
    """Fingerprints of the reduced gradients of the elements that this rank updates.

    Args:
        synchronizer: The synchronizer, whose `after_reduction` and `before_accumulation` are set.
        rank: Number of this rank in the world.
    """

    def __init__(self, synchronizer: GradientSynchronizer, rank: int) -> None:
        self._rank = rank
        self._recorded: dict[Bucket, Tensor] = {}
        self._comparisons: list[tuple[Bucket, Tensor]] = []
        synchronizer.after_reduction, synchronizer.before_accumulation = self._record, self._compare

    def discard(self) -> None:
        """Discard the fingerprints, because the step is skipped."""
        self._recorded.clear()
        self._comparisons.clear()

    def find_changes(self) -> Iterator[DetectedFault]:
        """Yield a fault for each parameter whose sums have changed. Afterwards they may change. Local."""
        for bucket in list(self._recorded):
            self._compare(bucket)
        compared, self._comparisons = self._comparisons, []
        for bucket, same in compared:
            for segment, is_same in zip(bucket.segments, same.tolist(), strict=True):
                if not is_same:
                    name = f"gradient/{segment.parameter.shard.name}"
                    what = "changed between the reduction and the update"
                    yield DetectedFault("memory", name, "synchronize", (self._rank,), what)

    def _record(self, bucket: Bucket) -> None:
        self._recorded[bucket] = _fingerprints(bucket)

    def _compare(self, bucket: Bucket) -> None:
        before = self._recorded.pop(bucket, None)
        if before is not None:
            self._comparisons.append((bucket, _fingerprints(bucket) == before))


def _fingerprints(bucket: Bucket) -> Tensor:
    """Return the fingerprint of each parameter's owned gradients."""
    return torch.stack([word_sum(values) for _, values, _ in bucket.owned_segments(bucket.owned_gradients)])
