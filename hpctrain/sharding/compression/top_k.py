"""Sums of the few largest elements of each parameter (deep gradient compression, arXiv 1712.01887)."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import SequentialWork, Work
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.reducer import ExactReduction, GradientReduction, rescale_residuals
from hpctrain.sharding.state import StateTensor, state_of_ranks


class TopK(GradientReduction):
    """Sum of the largest elements of each rank.

    Each rank sends the ceil(ratio n) largest of a parameter's n elements, with their indices. It chooses from
    v, the sum of its gradients that it has not sent. With `momentum`, v accumulates u = momentum u + g: v +=
    u, and both become zero where elements are sent. Then the optimizer needs no momentum. In the first
    `warmup` updates sums are exact and only u is updated, so that its sum over the ranks is the momentum at
    the end. On a single rank the sum is u.

    Attributes:
        parts: For each parameter that is trained, first element in the bucket, length, and number of elements
            to send.
        sent: Number of elements that this rank sends.
        velocity: u, flat [length]; empty without momentum.
        unsent: v, flat [length]; empty on a single rank.
    """

    def __init__(self, bucket: Bucket, ratio: float, momentum: float, warmup: int) -> None:
        self.bucket, self.group = bucket, bucket.sharding.group
        self.exact, self.momentum, self.warmup = ExactReduction(bucket), momentum, warmup
        self._warming_up = True
        lengths = (
            (s, s.parameter.shard.elements_of_real_rows) for s in bucket.segments if s.parameter.requires_grad
        )
        self.parts = [(segment.start, length, ceil(ratio * length)) for segment, length in lengths if length]
        self.sent = sum(count for *_, count in self.parts)
        device = self.group.device
        self.velocity = torch.zeros(bucket.length if momentum else 0, device=device)
        self.unsent = torch.zeros(bucket.length if self.group.size > 1 else 0, device=device)

    @override
    def begin(self, updates: int) -> None:
        self._warming_up = updates < self.warmup

    @override
    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        added = self.velocity.mul_(self.momentum).add_(gradients) if self.momentum else gradients
        if self._warming_up:
            return self.exact.start(gradients, sums)
        if self.group.size == 1:
            gradients.copy_(added)
            return Work(sums)
        self.unsent.add_(added)
        return SequentialWork(self._sum(gradients), sums)

    @override
    def end_step(self, updated: bool, scale_ratio: float) -> None:
        rescale_residuals((self.velocity, self.unsent), updated, scale_ratio)

    @override
    def state(self) -> Iterator[StateTensor]:
        if self.momentum:
            yield from state_of_ranks("reducer/momentum", self.velocity, self.bucket, "optimizer/momentum")
        if self.group.size > 1:
            yield from state_of_ranks("reducer/residual", self.unsent, self.bucket)

    def _sum(self, gradients: Tensor) -> Iterator[Work[Any]]:
        """Yield the all-gather, and compute before and after it."""
        places = self._largest()
        values = self.unsent[places]
        self.unsent[places] = 0
        if self.momentum:
            self.velocity[places] = 0
        message = torch.cat((values.view(torch.int32), places.int()))
        received = message.new_empty(self.group.size * message.numel())
        yield self.group.start_all_gather(message, received)
        wide = gradients if gradients.dtype == torch.float32 else torch.empty_like(self.unsent)
        wide.zero_()
        for of_rank in received.view(self.group.size, -1):  # the indices of one rank are distinct
            values, places = of_rank.split(self.sent)
            wide.index_add_(0, places, values.view(torch.float32))
        if wide is not gradients:
            gradients.copy_(wide)

    def _largest(self) -> Tensor:
        """Return the indices in the bucket of the elements to send."""
        chosen = [
            self.unsent[start : start + length].abs().topk(count, sorted=False).indices.add_(start)
            for start, length, count in self.parts
        ]
        return torch.cat(chosen) if chosen else self.unsent.new_empty(0, dtype=torch.int64)
