"""Exact sums in the first updates, and compressed ones afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import Work
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.reducer import ExactReduction, GradientReduction
from hpctrain.sharding.state import StateTensor


class WarmedUpReduction(GradientReduction):
    """Exact sums for `warmup` updates, then another GradientReduction, whose state does not change before."""

    def __init__(self, bucket: Bucket, reduction: GradientReduction, warmup: int) -> None:
        self.exact, self.reduction, self.warmup = ExactReduction(bucket), reduction, warmup
        self._now: GradientReduction = self.exact

    @override
    def begin(self, updates: int) -> None:
        self._now = self.exact if updates < self.warmup else self.reduction
        self._now.begin(updates)

    @override
    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        return self._now.start(gradients, sums)

    @override
    def end_step(self, updated: bool, scale_ratio: float) -> None:
        self.reduction.end_step(updated, scale_ratio)

    @override
    def state(self) -> Iterator[StateTensor]:
        return self.reduction.state()
