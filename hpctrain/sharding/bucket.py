"""Buckets: flat buffers of neighbouring layers' parameters and gradients.

Parameters are views into `values`, their fp32 gradients views into `gradients`. A Bucket knows when
its gradients are final, and starts their synchronization then, while backward goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.parallel.shard import Parameter

ALIGNMENT = 64
"""Buckets are padded to a multiple of so many elements times the ranks that share them."""


@dataclass(frozen=True)
class Segment:
    """One parameter's elements `start .. start + length` of its bucket."""

    parameter: Parameter
    start: int
    length: int

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat buffer of its bucket, in the parameter's shape."""
        return flat[self.start : self.start + self.length].view(self.parameter.shape)


class Bucket:
    """Parameters of neighbouring layers in flat buffers of one length on one data x context group.

    Decayed parameters come first: elements `0 .. decayed` take weight decay. The rest is padding to
    a multiple of ALIGNMENT and of the group's ranks, and stays zero. Without `gradients`, for a model that
    is not trained, that buffer is empty and the parameters have none.
    """

    def __init__(
        self,
        leaves: Sequence[Sequence[Parameter]],
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
        gradients: bool = True,
    ) -> None:
        self.group, self.dtype = group, dtype
        self.segments = _lay_out(leaves)
        self.decayed = sum(s.length for s in self.segments if s.parameter.decayed)
        used = sum(segment.length for segment in self.segments)
        step = ALIGNMENT * group.size
        self.length = -(-used // step) * step
        self.values = group.empty((self.length,), dtype).to(device).zero_()
        self.gradients = group.empty((self.length if gradients else 0,), torch.float32).to(device).zero_()
        for segment in self.segments:
            parameter = segment.parameter
            parameter.data = segment.view(self.values)
            parameter.gradient = segment.view(self.gradients) if gradients else None
        self.missing: dict[Parameter, int] = {}

    def expect(self, passes: int) -> None:
        """Expect the additions of `passes` backward passes (micro-batches), in any order."""
        self.missing = {
            segment.parameter: segment.parameter.uses * passes
            for segment in self.segments
            if segment.parameter.requires_grad
        }

    def added(self, parameter: Parameter) -> bool:
        """Note one addition; true when the bucket's gradients are final."""
        left = self.missing[parameter] - 1
        if left:
            self.missing[parameter] = left
        else:
            del self.missing[parameter]
        return not self.missing


def _lay_out(leaves: Sequence[Sequence[Parameter]]) -> list[Segment]:
    """Decayed before the others, layers with whole gradients before those with partial ones; each
    layer's parameters of a kind stay behind each other.
    """
    by_kind = sorted(leaves, key=lambda leaf: all(parameter.shard.partial for parameter in leaf))
    ordered = [p for decayed in (True, False) for leaf in by_kind for p in leaf if p.decayed is decayed]
    segments, start = [], 0
    for parameter in ordered:
        segments.append(Segment(parameter, start, parameter.numel()))
        start += parameter.numel()
    return segments


def make_buckets(
    leaves: Iterable[Sequence[Parameter]],
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: int,
    gradients: bool = True,
) -> list[Bucket]:
    """Cut the layers, in the order of the forward pass, into Buckets of about `bucket_bytes` of fp32
    gradients. A layer is never cut; one layer larger than that is a bucket of its own. `gradients` as in
    Bucket.
    """
    buckets: list[Bucket] = []
    pending: list[Sequence[Parameter]] = []
    size = 0
    for leaf in leaves:
        leaf_bytes = 4 * sum(parameter.numel() for parameter in leaf)
        if pending and size + leaf_bytes > bucket_bytes:
            buckets.append(Bucket(pending, group, dtype, device, gradients))
            pending, size = [], 0
        pending.append(leaf)
        size += leaf_bytes
    if pending:
        buckets.append(Bucket(pending, group, dtype, device, gradients))
    return buckets
