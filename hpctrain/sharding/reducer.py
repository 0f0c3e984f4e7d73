"""How a bucket's gradients become sums over the ranks that share it, and where these are."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.sharding.bucket import Bucket


class Summation(Protocol):
    """How they become sums: one for each bucket, so that it may have state of its own (`Stateful`).

    What becomes of a parameter's gradients depends on these alone (`bucket.segments`), and zeros stay zeros:
    other ranks hold it beside other parameters, or none, and are to get the same. The next `start` may come
    before what the last one gave is waited for; a plan's tensors have no values.
    """

    @property
    def scratch_bytes(self) -> int:
        """Memory that one needs while it is under way, beside gradients and sums."""

    def begin(self, updates: int) -> None:
        """A step begins, after so many updates: those before a run was resumed too, not steps without one."""

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum a bucket's `gradients`, which may be overwritten, over the ranks of its group.

        `sums` are these themselves, or where this rank's slice of them goes, there or elsewhere. They may be
        not finite, where the step is going to be skipped.
        """

    def after_step(self, updated: bool, factor: float) -> None:
        """The step is done, or skipped; gradients of the next one are scaled by `factor` more, as in fp16."""


class ExactSum:
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
        """See Summation."""
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

    def __init__(self, bucket: Bucket, summation: Summation) -> None:
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

    def __init__(self, bucket: Bucket, summation: Summation) -> None:
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


def make_reducer(bucket: Bucket, summation: Summation) -> Reducer:
    """As `layout.zero` asks for."""
    return (Reducer if bucket.sharding.zero < 2 else ReduceIntoSlice)(bucket, summation)
