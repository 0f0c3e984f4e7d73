"""Optimizer of a model that is only evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from typing_extensions import override

from hpctrain.optim.optimizer import Agreement, BucketState, Optimizer
from hpctrain.sharding.bucket import Bucket


class InferenceOptimizer(Optimizer):
    """Optimizer that never updates. It may hold the weights in `states` while they are initialized."""

    updates = 0

    def __init__(
        self,
        buckets: Sequence[Bucket] = (),
        states: Sequence[BucketState] = (),
        agreement: Agreement = nullcontext,
    ) -> None:
        super().__init__(None, buckets, states, agreement)

    @override
    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        raise AssertionError("a model that is only evaluated")
