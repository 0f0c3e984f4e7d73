"""The few largest elements of each parameter (deep gradient compression, arXiv 1712.01887)."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.work import SequentialWork, Work
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.communication import TopKTable
from hpctrain.deck.sections.optimizer import SgdTable
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.reducer import ExactReduction, GradientReduction
from hpctrain.sharding.state import StateTensor, state_of_ranks


class TopK:
    """Every rank sends the ceil(ratio n) largest of a parameter's n elements with their places; all add them.

    What it sends of is v, the sum of its gradients that it has not sent. With `momentum` each gradient goes
    on in the following steps before it comes to the others, as it would with theirs: u = momentum u + g,
    v += u, and of what is sent both begin again from zero. The sums are then what the parameters follow.
    In the first `warmup` updates sums are exact and u goes along, so that its sum over the ranks is the
    momentum by then. A rank alone sends nothing: it has u for the sum.
    """

    def __init__(self, bucket: Bucket, ratio: float, momentum: float, warmup: int) -> None:
        self.bucket, self.group = bucket, bucket.sharding.group
        self.exact, self.momentum, self.warmup = ExactReduction(bucket), momentum, warmup
        self._warm = True
        lengths = ((s, prod(s.parameter.shard.extent)) for s in bucket.segments if s.parameter.requires_grad)
        self._parts = [(segment.start, length, ceil(ratio * length)) for segment, length in lengths if length]
        self.sent = sum(count for *_, count in self._parts)
        device = self.group.device
        self.moving = torch.zeros(bucket.length if momentum else 0, device=device)
        alone = self.group.size == 1
        self.unsent = torch.zeros(0 if alone else bucket.length, device=device)

    @staticmethod
    def of(deck: Deck, bucket: Bucket) -> GradientReduction:
        """That of a deck; exact where everything would be sent, or a rank is alone without momentum."""
        keys, rule = deck.communication.compression, deck.optimizer.rule
        assert isinstance(keys, TopKTable)
        momentum = rule.momentum if isinstance(rule, SgdTable) else 0.0
        if keys.ratio == 1 or (bucket.sharding.group.size == 1 and not momentum):
            return ExactReduction(bucket)
        return TopK(bucket, keys.ratio, momentum, deck.communication.warmup)

    @property
    def scratch_bytes(self) -> int:
        """See GradientReduction: what is chosen and its places, those of all ranks, and of one parameter
        magnitudes and, as torch sorts them on a CPU, pairs of 16 bytes.
        """
        largest = max((length for _, length, _ in self._parts), default=0)
        messages = 8 * self.sent * (2 + self.group.size)
        summed = 0 if self.bucket.gradient_dtype == torch.float32 else 4 * self.bucket.length
        chosen = messages + max(20 * largest, summed)
        return max(self.exact.scratch_bytes if self.warmup else 0, chosen if self.group.size > 1 else 0)

    def begin(self, updates: int) -> None:
        """Begin a step."""
        self._warm = updates < self.warmup

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum the gradients of the bucket over the ranks of its group."""
        given = gradients
        if self.momentum:
            given = self.moving.mul_(self.momentum).add_(gradients)
        if self._warm:
            return self.exact.start(gradients, sums)
        if self.group.size == 1:
            gradients.copy_(given)
            return Work(sums)
        self.unsent.add_(given)
        return SequentialWork(self._sum(gradients), sums)

    def after_step(self, updated: bool, factor: float) -> None:
        """End a step."""
        for kept in (self.moving, self.unsent):
            if not updated:
                kept.zero_()
            elif factor != 1:
                kept.mul_(factor)

    def state(self) -> Iterator[StateTensor]:
        """Yield all tensors of the state. They are the same tensors in every step."""
        if self.momentum:
            yield from state_of_ranks("reducer/momentum", self.moving, self.bucket, "optimizer/momentum")
        if self.group.size > 1:
            yield from state_of_ranks("reducer/residual", self.unsent, self.bucket)

    def _sum(self, gradients: Tensor) -> Iterator[Work[Any]]:
        """The one operation, and what is computed before and after it."""
        places = self._largest()
        values = self.unsent[places]
        self.unsent[places] = 0
        if self.momentum:
            self.moving[places] = 0
        message = torch.cat((values.view(torch.int32), places.int()))
        received = message.new_empty(self.group.size * message.numel())
        yield self.group.start_all_gather(message, received)
        wide = gradients if gradients.dtype == torch.float32 else torch.empty_like(self.unsent)
        wide.zero_()
        for of_rank in received.view(self.group.size, -1):  # of one rank no two places are the same
            values, places = of_rank.split(self.sent)
            wide.index_add_(0, places, values.view(torch.float32))
        if wide is not gradients:
            gradients.copy_(wide)

    def _largest(self) -> Tensor:
        """The places in the bucket of what is sent."""
        chosen = [
            self.unsent[start : start + length].abs().topk(count, sorted=False).indices.add_(start)
            for start, length, count in self._parts
        ]
        return torch.cat(chosen) if chosen else self.unsent.new_empty(0, dtype=torch.int64)
