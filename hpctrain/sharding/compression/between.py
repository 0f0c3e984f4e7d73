"""Sums that are exact inside a node and compressed between nodes, where links are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace

from torch import Tensor
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.deck.schema import Deck
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.reducer import ExactReduction, GradientReduction
from hpctrain.sharding.replication import ZeroSharding
from hpctrain.sharding.state import Stateful, StateTensor


def whole_over(bucket: Bucket, group: Group) -> Bucket:
    """The same bucket as one that is summed whole over another group, whose ranks alone have state of it."""
    other = copy(bucket)
    other.sharding = ZeroSharding(0, group, bucket.sharding.replicas, bucket.sharding.apart)
    other.slice = other.own = slice(0, bucket.length)
    other.segments = tuple(
        replace(each, replication=replace(each.replication, sharding=other.sharding))
        for each in bucket.segments
    )
    return other


class BetweenNodes:
    """Sums exactly over the ranks `inside` a node, to one of them, which has the sums of all nodes by a
    Summation of its own, `between`, and hands them to the others.

    The ranks take turns at that from bucket to bucket, so that each of them uses the link; whose turn it is
    not has no `between`.
    """

    def __init__(self, bucket: Bucket, inside: Group, turn: int, between: GradientReduction | None) -> None:
        assert (between is not None) == (inside.rank == turn)
        self.bucket, self.inside, self.turn, self.between = bucket, inside, turn, between

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that the sum uses while it is in flight, without gradients and sums."""
        received = self.inside.host.scratch_bytes(self.bucket.length, self.bucket.gradient_dtype.itemsize)
        return max(received, self.between.scratch_bytes if self.between else 0)

    def begin(self, updates: int) -> None:
        """Begin a step."""
        if self.between is not None:
            self.between.begin(updates)

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """See GradientReduction. What is quick, inside the node, is done at once."""
        self.inside.start_reduce(gradients, self.turn).wait()
        work = Work(gradients) if self.between is None else self.between.start(gradients, gradients)
        return _HandedOut(self, work, gradients, sums)

    def hand_out(self, gradients: Tensor, sums: Tensor) -> None:
        """Take the sums, whole or this rank's slice of them, from the rank whose turn it was."""
        if sums is gradients:
            self.inside.start_broadcast(gradients, self.turn).wait()
            return
        share, first = sums.numel(), self.bucket.sharding.group.rank - self.inside.rank
        slices = gradients[first * share : (first + self.inside.size) * share]
        self.inside.start_scatter(slices, sums, self.turn).wait()

    def after_step(self, updated: bool, factor: float) -> None:
        """End a step."""
        if self.between is not None:
            self.between.after_step(updated, factor)

    def state(self) -> Iterator[StateTensor]:
        """Yield all tensors of the state. They are the same tensors in every step."""
        if self.between is not None and isinstance(self.between, Stateful):
            yield from self.between.state()


class _HandedOut(Work[Tensor]):
    """Sums between nodes, and then from the rank that has them to the others of its node."""

    __slots__ = ("_between", "_gradients", "_of")

    def __init__(self, of: BetweenNodes, between: Work[Tensor], gradients: Tensor, sums: Tensor) -> None:
        super().__init__(sums)
        self._of, self._gradients = of, gradients
        self._between: Work[Tensor] | None = between

    @override
    def proceed(self) -> None:
        if self._between is not None:
            self._between.proceed()

    def test(self) -> bool:
        """Help along what is under way; `wait` hands out."""
        if self._between is not None:
            self._between.test()
        return self._between is None

    @override
    def wait(self) -> Tensor:
        if self._between is not None:
            self._between.wait()
            self._between = None
            self._of.hand_out(self._gradients, self._result)
        return self._result


def between_nodes(
    make: Callable[[Deck, Bucket], GradientReduction], of_gradients: bool = True
) -> Callable[[Deck, Bucket], GradientReduction]:
    """The same between nodes alone, where the bucket's group is cut by node. On one node that leaves exact
    sums, if what is made gives those `of_gradients`, and not what becomes of them.
    """

    def made(deck: Deck, bucket: Bucket) -> GradientReduction:
        nodes = bucket.sharding.nodes
        if nodes is None or nodes.inside.size == 1:
            return make(deck, bucket)
        if nodes.between.size == 1 and of_gradients:
            return ExactReduction(bucket)
        turn = nodes.turn(bucket.layout.used)
        mine = turn == nodes.inside.rank
        between = make(deck, whole_over(bucket, nodes.between)) if mine else None
        return BetweenNodes(bucket, nodes.inside, turn, between)

    return made
