"""Summed gradients, which lie there from each bucket's sum to the update: whether they stay what they are.

A bucket is summed while backward goes on for others, and of one that is cut sums of several micro-batches may
be added up: fingerprints are taken as soon as a sum is there, and compared before anything is added to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.fingerprint import fingerprint
from hpctrain.sharding.synchronize import GradientSynchronizer


class ReducedGradients:
    """Those of a synchronizer on a rank of the world, of the elements that this rank updates."""

    def __init__(self, synchronizer: GradientSynchronizer, rank: int) -> None:
        self._rank = rank
        self._prints: dict[Bucket, Tensor] = {}
        self._same: list[tuple[Bucket, Tensor]] = []
        synchronizer.after_sum, synchronizer.before_adding = self._take, self._compare

    def forget(self) -> None:
        """They are not going to be used."""
        self._prints.clear()
        self._same.clear()

    def changed(self) -> Iterator[DetectedFault]:
        """Of which parameters they are not those that were summed; from here on they may change."""
        for bucket in list(self._prints):
            self._compare(bucket)
        found, self._same = self._same, []
        for bucket, same in found:
            for segment, is_same in zip(bucket.segments, same.tolist(), strict=True):
                if not is_same:
                    name = f"gradient/{segment.parameter.shard.name}"
                    what = "changed between the reduction and the update"
                    yield DetectedFault("memory", name, "synchronize", (self._rank,), what)

    def _take(self, bucket: Bucket) -> None:
        self._prints[bucket] = _of(bucket)

    def _compare(self, bucket: Bucket) -> None:
        before = self._prints.pop(bucket, None)
        if before is not None:
            self._same.append((bucket, _of(bucket) == before))


def _of(bucket: Bucket) -> Tensor:
    """A fingerprint of each parameter's."""
    return torch.stack([fingerprint(values) for _, values, _ in bucket.owned(bucket.own_gradients)])
