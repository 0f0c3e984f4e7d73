"""Gradient synchronization: each bucket is reduced as soon as its gradients are final."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.gradient_squares import FirstMicroBatchNorm
from hpctrain.sharding.reducer import Reducer
from hpctrain.sharding.replica_sync import ReplicaSync


class GradientSynchronizer:
    """Reduces gradients over the ranks that train on different tokens while the backward pass continues.

    Each addition to a parameter's gradient is counted. A bucket is final after the additions of all
    micro-batches of the step, in whatever order. Then three things happen:

    1. Gradients of padding heads are set to zero, and partial gradients are summed over the tensor ranks that
       hold the same piece.
    2. The bucket's Reducer starts. At most two reductions are in flight.
    3. Gradients of tied embeddings on two pipeline stages are exchanged and reduced later, in `finish`.

    `finish` waits for everything, and lets `replica_sync` act.

    Args:
        reducers: Reducers of all buckets.
        replica_sync: Synchronization of replicas.
        reduce_each_micro_batch: True to reduce after each micro-batch if the Reducer can (ZeRO-2, 3).
        noise_norm: Object that measures the gradients of the first micro-batch, if any.
        in_order: True if buckets are reduced from the last to the first one, whatever becomes final first.
            This is necessary if ranks may use parameters in different orders, as in a user's module.

    Attributes:
        before_reduction: Called with each bucket just before its gradients are reduced.
        after_reduction: Called with each bucket when its `owned_gradients` are sums, and again in `finish`
            after the sum over replicas.
        before_accumulation: Called with each bucket before sums are added to its `owned_gradients`, if any.
        on_gradients_complete: Called with the parameters of a bucket when layers have added all gradients.
    """

    def __init__(
        self,
        reducers: Sequence[Reducer],
        replica_sync: ReplicaSync,
        reduce_each_micro_batch: bool = False,
        noise_norm: FirstMicroBatchNorm | None = None,
        in_order: bool = False,
    ) -> None:
        self.buckets = buckets = [reducer.bucket for reducer in reducers]
        self.replica_sync, self.noise_norm = replica_sync, noise_norm
        self._reduce_each_micro_batch = reduce_each_micro_batch
        self.before_reduction: Callable[[Bucket], None] = lambda _: None
        self.after_reduction: Callable[[Bucket], None] = lambda _: None
        self.before_accumulation: Callable[[Bucket], None] = lambda _: None
        self._in_order, self._unreduced, self._waiting = in_order, list[Bucket](), set[Bucket]()
        self._synchronize_final = self._synchronize_in_order if in_order else self._synchronize
        self.reducers = dict(zip(buckets, reducers, strict=True))
        self._bucket = {s.parameter: bucket for bucket in buckets for s in bucket.segments}
        self._partial = {bucket: _partial_runs(bucket) for bucket in buckets}
        self._unevenly_split = {
            bucket: [s for s in bucket.segments if s.parameter.shard.unpadded_local] for bucket in buckets
        }
        self._tied_segments = {
            bucket: [(s, s.replication.tied_pipeline) for s in bucket.segments if s.replication.tied_pipeline]
            for bucket in buckets
        }
        self._has_replicas = any(b.sharding.replicas.size > 1 or b.sharding.diverging for b in buckets)
        self._in_flight: deque[tuple[Reducer, Work[Tensor]]] = deque()
        self.on_gradients_complete: Callable[[Sequence[Parameter]], None] = lambda _: None
        for parameter, bucket in self._bucket.items():
            parameter.on_gradient_added = self._on_gradient_added
            if parameter.open_gradient is not None:
                parameter.open_gradient = partial(self.open, bucket)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_move_gradient)

    @property
    def norm_estimators(self) -> list[Reducer | FirstMicroBatchNorm]:
        """Objects that compute square sums of the gradients of some of a step's tokens."""
        if self.noise_norm is not None:
            return [self.noise_norm]
        return [reducer for reducer in self.reducers.values() if reducer.computes_squares]

    def start(self, micro_batches: int, updates: int = 0) -> None:
        """Begin a step with zero gradients. Local.

        Args:
            micro_batches: Number of backward passes.
            updates: Number of updates of the whole run so far.
        """
        if self.noise_norm is not None:
            self.noise_norm.begin()
        for bucket, reducer in self.reducers.items():
            reducer.begin(updates)
            can_repeat = reducer.repeats and not self._tied_segments[bucket]
            bucket.start_step(micro_batches, self._reduce_each_micro_batch and can_repeat)
        self._unreduced = [bucket for bucket in self.buckets if not bucket.is_final] if self._in_order else []

    def finish(self) -> None:
        """Wait for all reductions, and reduce the gradients of tied embeddings and between replicas.

        A step calls it after its backward passes. Then `owned_gradients` of all buckets are sums. Collective
        over each bucket's ranks.
        """
        for bucket in self.buckets:
            assert bucket.is_final, f"no gradient of {bucket.incomplete_parameter().shard.name}"
        # Sort by name: the two stages may have them in different orders.
        tied = [(bucket, *each) for bucket in self.buckets for each in self._tied_segments[bucket]]
        for bucket, segment, pipeline in sorted(tied, key=lambda each: each[1].parameter.shard.name):
            gradient = segment.view(bucket.gradients)
            gradient.add_(exchange_with_other_end(pipeline, gradient))
        for bucket in self.buckets:
            if self._tied_segments[bucket]:
                self._start(bucket)
        self._complete(0)
        shared = [bucket for bucket in self.buckets if bucket.sharding.replicas.size > 1]
        for bucket in shared:
            self.before_accumulation(bucket)
        if self._has_replicas:
            self.replica_sync.before_update(self.buckets)
        for bucket in shared:
            self.after_reduction(bucket)

    def end_step(self, updated: bool, scale_ratio: float) -> None:
        """End a step.

        Args:
            updated: False if the step was skipped.
            scale_ratio: Ratio of the next step's loss scale to this step's.
        """
        for reducer in self.reducers.values():
            reducer.reduction.end_step(updated, scale_ratio)

    def open(self, bucket: Bucket) -> None:
        """Allocate the full gradients of a bucket of ZeRO-2 or 3 before its first gradient.

        Wait until at most one reduction is in flight, so that memory is free.
        """
        self._complete(1)
        bucket.open_gradients()

    def _on_gradient_added(self, parameter: Parameter) -> None:
        bucket = self._bucket[parameter]
        if self.noise_norm is not None:
            self.noise_norm.count_addition(parameter)
        if bucket.count_addition(parameter):
            self._synchronize_final(bucket)
        elif self._in_flight:
            self._in_flight[-1][1].test()

    def _synchronize_in_order(self, bucket: Bucket) -> None:
        """Reduce a final bucket after all later ones, and those that wait for it."""
        self._waiting.add(bucket)
        while self._unreduced and self._unreduced[-1] in self._waiting:
            bucket = self._unreduced.pop()
            self._waiting.remove(bucket)
            self._synchronize(bucket)

    def _synchronize(self, bucket: Bucket) -> None:
        self.on_gradients_complete([segment.parameter for segment in bucket.segments])
        bucket.merge_lookups()
        for segment in self._unevenly_split[bucket]:
            segment.parameter.shard.clear_padding(segment.view(bucket.gradients))
        self.before_reduction(bucket)
        for run, group in self._partial[bucket]:
            group.all_reduce(bucket.gradients[run])
        if not self._tied_segments[bucket]:
            self._complete(1)  # each reduction in flight receives into memory of its own
            for _, work in self._in_flight:
                work.proceed()
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        reducer = self.reducers[bucket]
        self._in_flight.append((reducer, reducer.start()))

    def _complete(self, remaining: int) -> None:
        """Complete reductions in flight, except the `remaining` latest ones."""
        while len(self._in_flight) > remaining:
            reducer, work = self._in_flight.popleft()
            work.wait()
            self.before_accumulation(reducer.bucket)
            reducer.complete()
            self.after_reduction(reducer.bucket)


def exchange_with_other_end(pipeline: Group, tensor: Tensor) -> Tensor:
    """Return the tensor of the last pipeline stage on the first one, and vice versa. Collective over both."""
    other = pipeline.size - 1 if pipeline.rank == 0 else 0
    received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    receiving = pipeline.start_recv(received, other)
    sending = pipeline.start_send(tensor, other)
    receiving.wait()
    sending.wait()
    return received


def _partial_runs(bucket: Bucket) -> list[tuple[slice, Group]]:
    """Return the parts of the bucket whose gradients are partial, each with the group that sums them."""
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
    """Add `.grad` of a parameter of torch's own layers to the buffer of gradients, as a hook of autograd."""
    assert isinstance(parameter, Parameter)
    if parameter.grad is None:  # the layer adds to the buffer by itself
        return
    assert parameter.gradient is not None
    parameter.gradient.add_(parameter.grad)
    parameter.grad = None
    parameter.mark_gradient_added()
