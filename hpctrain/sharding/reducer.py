"""How a bucket's gradients become sums over the ranks that share it, and where these are."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.sharding.bucket import Bucket


class GradientReduction(Protocol):
    """Sum of the gradients of one bucket over ranks. It may have state of its own (`Stateful`).

    The result for a parameter must depend only on its own gradients (`bucket.segments`), since other ranks
    may hold it with other parameters. Zeros must stay zeros. The next `start` may come before the last result
    was waited for. Tensors of a plan have no values.
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
        """Start to sum the gradients of the bucket over the ranks of its group.

        Args:
            gradients: The gradients, which may be overwritten. They may be not finite if the step will be
                skipped.
            sums: Memory for this rank's slice of the sums, which may be `gradients` or a part of it.
        """

    def after_step(self, updated: bool, factor: float) -> None:
        """End a step.

        Args:
            updated: False if the step was skipped.
            factor: Ratio of the next step's loss scale to this step's.
        """


class ExactReduction:
    """All bits travel."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.group = bucket, bucket.sharding.group

    @property
    def scratch_bytes(self) -> int:
        """Reductions in host memory receive there."""
        cut = self.bucket.sharding.zero > 0
        sizes = self.bucket.layout.sizes if cut else None
        most = self.bucket.length if sizes is None else max(sizes) * self.group.size
        return self.group.host.scratch_bytes(most, self.bucket.gradient_dtype.itemsize, cut)

    def begin(self, updates: int) -> None:
        """Every step is like every other."""

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum the gradients of the bucket over the ranks of its group."""
        if sums is gradients:
            return self.group.start_all_reduce(gradients)
        return self.group.start_reduce_scatter(gradients, sums, self.bucket.layout.sizes)

    def after_step(self, updated: bool, factor: float) -> None:
        """Nothing is left of it."""


class Reducer:
    """Sums in place: all of them, or of each rank its slice (ZeRO-1); `own_gradients` are sums afterwards.

    `repeats` says whether it may sum several times a step, whose sums it then adds.
    """

    repeats = False

    def __init__(self, bucket: Bucket, summation: GradientReduction) -> None:
        self.bucket, self.summation = bucket, summation

    def begin(self, updates: int) -> None:
        """A step begins, without sums, after so many updates."""
        self.summation.begin(updates)

    def start(self) -> Work[Tensor]:
        """Start to sum the bucket's final gradients."""
        whole = self.bucket.final_gradients()
        sums = whole if self.bucket.sharding.zero == 0 else whole[self.bucket.slice]
        return self.summation.start(whole, sums)

    def complete(self) -> None:
        """Called when the work of the earliest `start` is done."""


class ReduceIntoSlice(Reducer):
    """Every rank keeps the sums of its slice; whole gradients go with each start (ZeRO-2, 3)."""

    repeats = True

    def __init__(self, bucket: Bucket, summation: GradientReduction) -> None:
        super().__init__(bucket, summation)
        self._under_way: deque[tuple[Tensor, Tensor]] = deque()
        self._first = True

    def begin(self, updates: int) -> None:
        """Forget the sums of the last step."""
        super().begin(updates)
        self._first = True

    def start(self) -> Work[Tensor]:
        """Start to sum the bucket's final gradients, the step's first sums to where they stay."""
        whole = self.bucket.final_gradients()
        self.bucket.take_gradients()
        summed = self.bucket.own_gradients if self._first else whole[self.bucket.slice]
        self._first = False
        self._under_way.append((whole, summed))
        return self.summation.start(whole, summed)

    def complete(self) -> None:
        """Add what is summed to what was before, and free the whole gradients."""
        whole, summed = self._under_way.popleft()
        if summed is not self.bucket.own_gradients:
            self.bucket.own_gradients.add_(summed)
        self.bucket.sharding.pool.give(whole)


def make_reducer(bucket: Bucket, summation: GradientReduction) -> Reducer:
    """As `layout.zero` asks for."""
    return (Reducer if bucket.sharding.zero < 2 else ReduceIntoSlice)(bucket, summation)
