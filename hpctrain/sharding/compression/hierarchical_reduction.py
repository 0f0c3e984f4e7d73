"""Sums that are exact inside a node and compressed between nodes, where links are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial

from torch import Tensor
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.reducer import GradientReduction
from hpctrain.sharding.replication import ZeroSharding
from hpctrain.sharding.state import StateTensor


def bucket_over_group(bucket: Bucket, group: Group) -> Bucket:
    """Return a bucket with the same memory, but without ZeRO, for a reduction over another group."""
    other = copy(bucket)
    other.sharding = ZeroSharding(0, group, bucket.sharding.replicas, bucket.sharding.diverging)
    other.slice = other.owned_slice = slice(0, bucket.length)
    other.segments = tuple(
        replace(each, replication=replace(each.replication, sharding=other.sharding))
        for each in bucket.segments
    )
    return other


class HierarchicalReduction(GradientReduction):
    """Exact sum inside a node, followed by another GradientReduction between nodes.

    For each bucket, one rank inside exchanges the node's sums with other nodes, and returns the results to
    the ranks inside. The ranks take turns from bucket to bucket, so that each of them uses the link.
    `start` waits for the sum inside the node. `wait` of its result is collective over the ranks inside.

    Args:
        bucket: The bucket.
        inside: Ranks of this node.
        exchanging_rank: Number of the rank inside that exchanges this bucket.
        between: Reduction between nodes; UnreducedGradients on ranks other than that one.
    """

    def __init__(
        self, bucket: Bucket, inside: Group, exchanging_rank: int, between: GradientReduction
    ) -> None:
        self.bucket, self.inside = bucket, inside
        self.exchanging_rank, self.between = exchanging_rank, between

    @override
    def begin(self, updates: int) -> None:
        self.between.begin(updates)

    @override
    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        # The sum inside the node is fast, so it completes here; only the sum between nodes is in flight.
        self.inside.start_reduce(gradients, self.exchanging_rank).wait()
        work = self.between.start(gradients, gradients)
        return _HierarchicalWork(work, partial(self.distribute, gradients, sums), sums)

    def distribute(self, gradients: Tensor, sums: Tensor) -> None:
        """Receive the sums, or this rank's slice of them, from the rank that has exchanged them.

        Collective over the ranks inside.
        """
        if sums is gradients:
            self.inside.start_broadcast(gradients, self.exchanging_rank).wait()
            return
        share, first = sums.numel(), self.bucket.sharding.group.rank - self.inside.rank
        slices = gradients[first * share : (first + self.inside.size) * share]
        self.inside.start_scatter(slices, sums, self.exchanging_rank).wait()

    @override
    def end_step(self, updated: bool, scale_ratio: float) -> None:
        self.between.end_step(updated, scale_ratio)

    @override
    def state(self) -> Iterator[StateTensor]:
        return self.between.state()


class _HierarchicalWork(Work[Tensor]):
    """Handle of a sum between nodes, whose `wait` distributes the result inside the node."""

    __slots__ = ("_between", "_complete", "_distribute")

    def __init__(self, between: Work[Tensor], distribute: Callable[[], None], sums: Tensor) -> None:
        super().__init__(sums)
        self._between, self._distribute, self._complete = between, distribute, False

    @override
    def proceed(self) -> None:
        self._between.proceed()

    @override
    def test(self) -> bool:
        """Let the sum between nodes make progress. Only `wait` completes the handle. Local."""
        self._between.test()
        return self._complete

    @override
    def wait(self) -> Tensor:
        if not self._complete:
            self._between.wait()
            self._distribute()
            self._complete = True
        return self._result
