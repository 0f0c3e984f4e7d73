"""Gradient synchronization: each bucket as soon as its gradients are final."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpctrain.comm.group import Group, Work
from hpctrain.errors import HpctrainError
from hpctrain.parallel.shard import Parameter
from hpctrain.sharding.bucket import Bucket, Segment


class GradientSynchronizer:
    """Sums gradients over the data x context group while backward goes on.

    A bucket is final after every parameter's additions of all micro-batches of the step, whatever
    their order. Then the gradients that are partial over the tensor axis are summed there (those of
    heads that several ranks share over `sharing`, the ranks that hold the same heads), and the
    bucket's all-reduce over data x context starts; `finish` waits for it, and then sums tied embeddings
    over the two stages of the pipeline that hold them.
    """

    def __init__(
        self, buckets: Sequence[Bucket], tensor: Group, sharing: Group, pipeline: Group | None = None
    ) -> None:
        self.buckets = buckets
        self._tied = [
            (pipeline, segment.view(bucket.gradients))
            for bucket in buckets
            for segment in bucket.segments
            if pipeline is not None and segment.parameter.shard.stage_copies > 1
        ]
        self._bucket = {s.parameter: bucket for bucket in buckets for s in bucket.segments}
        self._partial = {bucket: _partial_runs(bucket, tensor, sharing) for bucket in buckets}
        self._works: list[Work[Tensor]] = []
        for parameter in self._bucket:
            parameter.on_added = self._added
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_mover(parameter))

    def start(self, micro_batches: int) -> None:
        """Begin a step of `micro_batches` backward passes with zero gradients."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
            bucket.expect(micro_batches)

    def finish(self) -> None:
        """Wait until all gradients are summed."""
        for bucket in self.buckets:
            assert not bucket.missing, f"no gradient of {next(iter(bucket.missing)).shard.name}"
        for work in self._works:
            work.wait()
        self._works.clear()
        for group, gradient in self._tied:
            _sum_over_ends(group, gradient)

    def _added(self, parameter: Parameter) -> None:
        bucket = self._bucket[parameter]
        if bucket.added(parameter):
            self._synchronize(bucket)
        elif self._works:
            self._works[-1].test()

    def _synchronize(self, bucket: Bucket) -> None:
        for run, group in self._partial[bucket]:
            group.all_reduce(bucket.gradients[run])
        if bucket.group.size > 1:
            self._works.append(bucket.group.start_all_reduce(bucket.gradients))


def _sum_over_ends(pipeline: Group, gradient: Tensor) -> None:
    """Sum the gradient of tied embeddings over the first and the last stage, the same bits on both."""
    other = pipeline.size - 1 if pipeline.rank == 0 else 0
    theirs = torch.empty_like(gradient)
    receiving = pipeline.start_recv(theirs, other)
    sending = pipeline.start_send(gradient, other)
    receiving.wait()
    sending.wait()
    gradient.add_(theirs)


def _partial_runs(bucket: Bucket, tensor: Group, sharing: Group) -> list[tuple[slice, Group]]:
    """Stretches of the bucket whose gradients are partial, each with the group to sum them over."""
    runs: list[tuple[slice, Group]] = []
    for segment in bucket.segments:
        shard = segment.parameter.shard
        if "tensor" not in shard.partial:
            continue
        group = sharing if shard.copies > 1 else tensor
        end = segment.start + segment.length
        if runs and runs[-1][0].stop == segment.start and runs[-1][1] is group:
            runs[-1] = (slice(runs[-1][0].start, end), group)
        else:
            runs.append((slice(segment.start, end), group))
    return runs


def _mover(parameter: Parameter) -> Callable[[Tensor], None]:
    """A hook for parameters of torch's own layers: move `.grad` into the fp32 buffer."""

    def move(_: Tensor) -> None:
        assert parameter.gradient is not None
        if parameter.grad is None:  # of a layer that adds to the buffer by itself
            return
        parameter.gradient.add_(parameter.grad)
        parameter.grad = None
        parameter.added()

    return move


def check_replicas(buckets: Sequence[Bucket], tensor: Group, everyone: Group) -> None:
    """Raise on all ranks, naming each tensor, if ranks that hold the same piece hold other values.

    Compares wrapping sums of the bit patterns, weighted by position.
    """
    segments = [(bucket, segment) for bucket in buckets for segment in bucket.segments]
    whole = [(bucket, s) for bucket, s in segments if "tensor" not in s.parameter.shard.split]
    names = {
        *_differing(segments, buckets[0].group),
        *_differing(whole, tensor),
    }
    found = sorted({name for rank in everyone.all_gather_object(sorted(names)) for name in rank})
    if found:
        raise HpctrainError(
            [f"parameter {name} differs between ranks that should hold the same values" for name in found]
        )


def _differing(segments: Sequence[tuple[Bucket, Segment]], group: Group) -> list[str]:
    """Names of the parameters that are not the same on all ranks of the group."""
    if not segments or group.size == 1:
        return []
    sums = torch.stack([_fingerprint(segment.view(bucket.values)) for bucket, segment in segments])
    gathered = group.all_gather(sums.unsqueeze(0))
    return [
        segment.parameter.shard.name
        for index, (_, segment) in enumerate(segments)
        if not bool((gathered[:, index] == gathered[0, index]).all())
    ]


def _fingerprint(values: Tensor) -> Tensor:
    """An int64 sum over the bits of `values`, to which every element's position matters."""
    bits = values.reshape(-1).view(torch.int32 if values.element_size() == 4 else torch.int16).long()
    weights = torch.arange(1, bits.numel() + 1, device=bits.device) * 2 + 1
    return (bits * weights).sum()
