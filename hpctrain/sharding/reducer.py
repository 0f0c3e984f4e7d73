"""Reduction of a bucket's gradients over the ranks that share it.

A GradientReduction sums the gradients: exactly (ExactReduction) or with fewer bytes (`compression`). A
Reducer decides where the sums are stored. With `layout.zero` 0 they replace the gradients on all ranks, with
1 in each rank's slice. With 2 and 3 (ReduceIntoSlice) each rank keeps its slice, and the memory of all other
gradients returns to the pool.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import Work
from hpctrain.sharding.bucket import Bucket


class GradientReduction(Protocol):
    """Sum of the gradients of one bucket over ranks. It may have state of its own (`Stateful`).

    The result for a parameter must depend only on the gradients of that parameter, because other ranks may
    hold it next to other parameters. Zeros must stay zeros. The next `start` may come before the previous
    handle was waited for. In plans, tensors have no values.
    """

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that the sum uses while it is in flight, without gradients and sums."""

    def begin(self, updates: int) -> None:
        """Begin a step.

        Args:
            updates: Number of updates of the whole run so far, including those before a resume.
        """

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum the gradients of the bucket over the ranks of its group. Collective.

        Args:
            gradients: The gradients, which may be overwritten. They may be not finite if the step will be
                skipped.
            sums: Memory for this rank's slice of the sums, which may be `gradients` or a part of it.

        Returns:
            Handle whose result is `sums`.
        """

    def after_step(self, updated: bool, factor: float) -> None:
        """End a step.

        Args:
            updated: False if the step was skipped.
            factor: Ratio of the next step's loss scale to this step's.
        """


class ExactReduction(GradientReduction):
    """Sum of gradients in their own format, by all-reduce or reduce-scatter."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.group = bucket, bucket.sharding.group

    @property
    @override
    def scratch_bytes(self) -> int:
        # Reductions in host memory receive into memory of their own.
        cut = self.bucket.sharding.zero > 0
        sizes = self.bucket.layout.sizes if cut else None
        most = self.bucket.length if sizes is None else max(sizes) * self.group.size
        return self.group.host.scratch_bytes(most, self.bucket.gradient_dtype.itemsize, cut)

    @override
    def begin(self, updates: int) -> None:
        """Do nothing: all steps are alike."""

    @override
    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        if sums is gradients:
            return self.group.start_all_reduce(gradients)
        return self.group.start_reduce_scatter(gradients, sums, self.bucket.layout.sizes)

    @override
    def after_step(self, updated: bool, factor: float) -> None:
        """Do nothing: it has no state."""


class Reducer:
    """Reduction in place, for ZeRO-0 (all gradients) and ZeRO-1 (this rank's slice of them).

    Args:
        bucket: The bucket.
        reduction: How gradients are summed.

    Attributes:
        repeats: True if it may reduce several times in a step, and adds the sums.
    """

    repeats = False

    def __init__(self, bucket: Bucket, reduction: GradientReduction) -> None:
        self.bucket, self.reduction = bucket, reduction

    def begin(self, updates: int) -> None:
        """Begin a step, after this number of updates of the run."""
        self.reduction.begin(updates)

    def start(self) -> Work[Tensor]:
        """Start to reduce the bucket's final gradients. Collective over the group."""
        gradients = self.bucket.final_gradients()
        sums = gradients if self.bucket.sharding.zero == 0 else gradients[self.bucket.slice]
        return self.reduction.start(gradients, sums)

    def complete(self) -> None:
        """Finish the earliest `start`, after its handle is complete.

        Then `owned_gradients` of the bucket are sums.
        """


class ReduceIntoSlice(Reducer):
    """Reduction to the slice that each rank keeps (ZeRO-2 and 3).

    It may run after each micro-batch. Then the first sums are stored in place, and later ones are added.
    """

    repeats = True

    def __init__(self, bucket: Bucket, reduction: GradientReduction) -> None:
        super().__init__(bucket, reduction)
        self._in_flight: deque[tuple[Tensor, Tensor]] = deque()
        self._first = True

    @override
    def begin(self, updates: int) -> None:
        super().begin(updates)
        self._first = True

    @override
    def start(self) -> Work[Tensor]:
        gradients = self.bucket.final_gradients()
        self.bucket.take_gradients()
        summed = self.bucket.owned_gradients if self._first else gradients[self.bucket.slice]
        self._first = False
        self._in_flight.append((gradients, summed))
        return self.reduction.start(gradients, summed)

    @override
    def complete(self) -> None:
        gradients, summed = self._in_flight.popleft()
        if summed is not self.bucket.owned_gradients:
            self.bucket.owned_gradients.add_(summed)
        self.bucket.sharding.pool.give(gradients)


def make_reducer(bucket: Bucket, reduction: GradientReduction) -> Reducer:
    """Return the Reducer for the bucket's stage of ZeRO."""
    return (Reducer if bucket.sharding.zero < 2 else ReduceIntoSlice)(bucket, reduction)
