"""How a bucket's gradients become sums over the ranks that share it."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.sharding.bucket import Bucket


class Reducer(Protocol):
    """One for each bucket, so that it may have state of its own; afterwards `own_gradients` are sums.

    `repeats` says whether it may sum several times a step, whose sums it then adds.
    """

    bucket: Bucket
    repeats: bool

    def begin(self) -> None:
        """A step begins, without sums."""

    def start(self) -> Work[Tensor]:
        """Start to sum the bucket's final gradients."""

    def complete(self) -> None:
        """Called when the work of the earliest `start` is done."""


class AllReduce:
    """Every rank has all sums, in place."""

    repeats = False

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def begin(self) -> None:
        """Nothing is left of the last step."""

    def start(self) -> Work[Tensor]:
        """Start to sum the bucket's final gradients."""
        return self.bucket.sharding.group.start_all_reduce(self.bucket.final_gradients())

    def complete(self) -> None:
        """They are where they belong."""


class ReduceScatter(AllReduce):
    """Every rank has the sums of its slice, in place (ZeRO-1)."""

    def start(self) -> Work[Tensor]:
        """Start to sum the bucket's final gradients."""
        whole = self.bucket.final_gradients()
        return self.bucket.sharding.group.start_reduce_scatter(whole, whole[self.bucket.slice])


class ReduceIntoSlice:
    """Every rank keeps the sums of its slice; whole gradients go with each start (ZeRO-2, 3)."""

    repeats = True

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._under_way: deque[tuple[Tensor, Tensor]] = deque()
        self._first = True

    def begin(self) -> None:
        """Forget the sums of the last step."""
        self._first = True

    def start(self) -> Work[Tensor]:
        """Start to sum the bucket's final gradients, the step's first sums to where they stay."""
        whole = self.bucket.final_gradients()
        self.bucket.take_gradients()
        summed = self.bucket.own_gradients if self._first else whole[self.bucket.slice]
        self._first = False
        self._under_way.append((whole, summed))
        return self.bucket.sharding.group.start_reduce_scatter(whole, summed)

    def complete(self) -> None:
        """Add what is summed to what was before, and free the whole gradients."""
        whole, summed = self._under_way.popleft()
        if summed is not self.bucket.own_gradients:
            self.bucket.own_gradients.add_(summed)
        self.bucket.sharding.pool.give(whole)


def make_reducer(bucket: Bucket) -> Reducer:
    """As `layout.zero` asks for."""
    return (AllReduce, ReduceScatter, ReduceIntoSlice, ReduceIntoSlice)[bucket.sharding.zero](bucket)
