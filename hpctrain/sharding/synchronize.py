"""Gradient synchronization: each bucket as soon as its gradients are final."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.errors import HpctrainError
from hpctrain.memory.scratch import Flat
from hpctrain.parallel.shard import Parameter
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.fingerprint import PlacedFingerprints
from hpctrain.sharding.measured_reduction import FirstMicroBatch, MeasuredReduction
from hpctrain.sharding.reducer import Reducer
from hpctrain.sharding.replica_sync import ReplicaSync


class GradientSynchronizer:
    """Sums gradients over the ranks that train on other tokens while backward goes on.

    A bucket is final after every parameter's additions of all micro-batches of the step, whatever
    their order; with `each`, for buckets that are cut, after those of every micro-batch, whose sums are then
    added to the slices. Then the gradients that are partial are summed over the ranks that hold the same
    piece, and the bucket's Reducer starts. Tied embeddings on two stages of the pipeline are summed
    over these before that, at the end of the step. `finish` waits for everything, and has `outer` keep the
    replicas together. `first`, if any, learns of all additions. Where ranks may come to parameters in other
    orders, as with a module that users bring, buckets are summed `in_order`, the last one first.
    """

    def __init__(
        self,
        reducers: Sequence[Reducer],
        outer: ReplicaSync,
        each: bool = False,
        first: FirstMicroBatch | None = None,
        in_order: bool = False,
    ) -> None:
        self.buckets = buckets = [reducer.bucket for reducer in reducers]
        self._outer, self._each, self.first = outer, each, first
        self.before_sums: Callable[[Bucket], None] = lambda _: None
        self.after_sum: Callable[[Bucket], None] = lambda _: None
        """Called with each bucket whose `own_gradients` are sums from here on."""
        self.before_adding: Callable[[Bucket], None] = lambda _: None
        """Called with each bucket to whose sums others are about to be added, if there are any by now."""
        self._in_order, self._to_come, self._waiting = in_order, list[Bucket](), set[Bucket]()
        self._reducer = dict(zip(buckets, reducers, strict=True))
        self._bucket = {s.parameter: bucket for bucket in buckets for s in bucket.segments}
        self._partial = {bucket: _partial_runs(bucket) for bucket in buckets}
        self._tied = {
            bucket: [(s, s.replication.ends) for s in bucket.segments if s.replication.ends]
            for bucket in buckets
        }
        self._under_way: deque[tuple[Reducer, Work[Tensor]]] = deque()
        self.all_added: Callable[[Sequence[Parameter]], None] = lambda _: None
        """Called with parameters to whose gradients layers have added all, and nothing else is done yet."""
        for parameter, bucket in self._bucket.items():
            parameter.on_added = self._added
            if parameter.open_gradient is not None:
                parameter.open_gradient = partial(self.open, bucket)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_move_gradient)

    @property
    def scratch_bytes(self) -> int:
        """Memory of reductions: two are under way at once, and those between replicas."""
        two = sorted(reducer.summation.scratch_bytes for reducer in self._reducer.values())[-2:]
        return sum(two) + self._outer.scratch_bytes

    @property
    def measured(self) -> list[MeasuredReduction | FirstMicroBatch]:
        """What takes square sums of gradients of some of a step's tokens: Summations, or `first`."""
        if self.first is not None:
            return [self.first]
        return [r.summation for r in self._reducer.values() if isinstance(r.summation, MeasuredReduction)]

    def start(self, micro_batches: int, updates: int = 0) -> None:
        """Begin a step of `micro_batches` backward passes with zero gradients, after so many `updates`."""
        if self.first is not None:
            self.first.begin()
        for bucket, reducer in self._reducer.items():
            reducer.begin(updates)
            bucket.start(micro_batches, self._each and reducer.repeats and not self._tied[bucket])
        self._to_come = [bucket for bucket in self.buckets if not bucket.final] if self._in_order else []

    def finish(self) -> None:
        """Wait until all gradients are summed."""
        for bucket in self.buckets:
            assert bucket.final, f"no gradient of {bucket.missing().shard.name}"
        # By name: on the two stages they may lie in buckets in other orders.
        tied = [(bucket, *each) for bucket in self.buckets for each in self._tied[bucket]]
        for bucket, segment, ends in sorted(tied, key=lambda each: each[1].parameter.shard.name):
            gradient = segment.view(bucket.gradients)
            gradient.add_(from_other_end(ends, gradient))
        for bucket in self.buckets:
            if self._tied[bucket]:
                self._start(bucket)
        self._complete(0)
        shared = [bucket for bucket in self.buckets if bucket.sharding.replicas.size > 1]
        for bucket in shared:
            self.before_adding(bucket)
        self._outer.before_update(self.buckets)
        for bucket in shared:
            self.after_sum(bucket)

    def after_step(self, updated: bool, factor: float) -> None:
        """End a step."""
        for reducer in self._reducer.values():
            reducer.summation.after_step(updated, factor)

    def open(self, bucket: Bucket) -> None:
        """Have whole gradients of a bucket that is cut, in the memory of those that are summed by now."""
        self._complete(1)
        bucket.open_gradients()

    def _added(self, parameter: Parameter) -> None:
        bucket = self._bucket[parameter]
        if self.first is not None:
            self.first.added(parameter)
        if bucket.added(parameter):
            self._sum(bucket)
        elif self._under_way:
            self._under_way[-1][1].test()

    def _sum(self, bucket: Bucket) -> None:
        """Sum a bucket that is final, and all that waits for it."""
        if not self._in_order:
            self._synchronize(bucket)
            return
        self._waiting.add(bucket)
        while self._to_come and self._to_come[-1] in self._waiting:
            bucket = self._to_come.pop()
            self._waiting.remove(bucket)
            self._synchronize(bucket)

    def _synchronize(self, bucket: Bucket) -> None:
        self.all_added([segment.parameter for segment in bucket.segments])
        bucket.merge_lookups()
        self.before_sums(bucket)
        for run, group in self._partial[bucket]:
            group.all_reduce(bucket.gradients[run])
        if not self._tied[bucket]:
            self._complete(1)  # each one under way receives into memory of its own
            for _, work in self._under_way:
                work.proceed()
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        reducer = self._reducer[bucket]
        self._under_way.append((reducer, reducer.start()))

    def _complete(self, but: int) -> None:
        """Complete the reductions under way, `but` for so many of the latest."""
        while len(self._under_way) > but:
            reducer, work = self._under_way.popleft()
            work.wait()
            self.before_adding(reducer.bucket)
            reducer.complete()
            self.after_sum(reducer.bucket)


def from_other_end(pipeline: Group, own: Tensor) -> Tensor:
    """What the last stage has in the place of the first one's `own`, and the other way round."""
    other = pipeline.size - 1 if pipeline.rank == 0 else 0
    theirs = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    receiving = pipeline.start_recv(theirs, other)
    sending = pipeline.start_send(own, other)
    receiving.wait()
    sending.wait()
    return theirs


def _partial_runs(bucket: Bucket) -> list[tuple[slice, Group]]:
    """Stretches of the bucket whose gradients are partial, each with the group to sum them over."""
    runs: list[tuple[slice, Group]] = []
    for segment in bucket.segments:
        if not segment.replication.partial:
            continue
        group = segment.replication.holders
        end = segment.start + segment.length
        if runs and runs[-1][0].stop == segment.start and runs[-1][1] is group:
            runs[-1] = (slice(runs[-1][0].start, end), group)
        else:
            runs.append((slice(segment.start, end), group))
    return runs


def _move_gradient(parameter: Tensor) -> None:
    """A hook for parameters of torch's own layers: `.grad` goes into the fp32 buffer."""
    assert isinstance(parameter, Parameter)
    if parameter.grad is None:  # of a layer that adds to the buffer by itself
        return
    assert parameter.gradient is not None
    parameter.gradient.add_(parameter.grad)
    parameter.grad = None
    parameter.added()


def check_replicas(buckets: Sequence[Bucket], everyone: Group) -> None:
    """Raise on all ranks, naming each tensor, if ranks that hold the same piece hold other values.

    Compares wrapping sums of the bit patterns, weighted by position.
    """
    held: dict[Group, list[tuple[BucketSegment, Flat]]] = {}
    for bucket in buckets:
        for segment, values, _ in bucket.owned(bucket.own_values):
            replicas = () if bucket.sharding.apart else (bucket.sharding.replicas,)
            for holders in (segment.replication.holders, *replicas):
                held.setdefault(holders, []).append((segment, values))
        if bucket.sharding.zero < 3 and bucket.values is not None:
            of_all = [(segment, segment.view(bucket.values)) for segment in bucket.segments]
            held.setdefault(bucket.sharding.group, []).extend(of_all)
    fingerprints = PlacedFingerprints()
    names = {name for group, parts in held.items() for name in _differing(parts, group, fingerprints)}
    names.update(_differing_ends(buckets, fingerprints))
    differing = sorted({name for rank in everyone.all_gather_object(sorted(names)) for name in rank})
    if differing:
        raise HpctrainError(
            [f"parameter {name} differs between ranks that should hold the same values" for name in differing]
        )


def _differing(
    parts: Sequence[tuple[BucketSegment, Flat]], group: Group, fingerprints: PlacedFingerprints
) -> list[str]:
    """Names of the parameters whose values are not the same on all ranks of the group."""
    if not parts or group.size == 1:
        return []
    sums = torch.stack([fingerprints.of(values) for _, values in parts])
    gathered = group.all_gather(sums.unsqueeze(0))
    return [
        segment.parameter.shard.name
        for index, (segment, _) in enumerate(parts)
        if not bool((gathered[:, index] == gathered[0, index]).all())
    ]


def _differing_ends(buckets: Sequence[Bucket], fingerprints: PlacedFingerprints) -> Iterator[str]:
    """Names of the parameters that the first and the last stage of the pipeline hold with other values.

    Slices are cut in other places on the two: the sums over all of them are compared.
    """
    owned = [(bucket, *each) for bucket in buckets for each in bucket.owned(bucket.own_values)]
    for bucket, segment, values, offset in sorted(owned, key=lambda each: each[1].parameter.shard.name):
        ends = segment.replication.ends
        if ends is not None:
            own = fingerprints.of(values, offset).unsqueeze(0)
            if bucket.sharding.zero > 0:
                own = bucket.sharding.group.all_gather(own).sum(0, keepdim=True)
            if not torch.equal(own, from_other_end(ends, own)):
                yield segment.parameter.shard.name
