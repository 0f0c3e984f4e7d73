"""1-bit Adam's momentum (arXiv 2102.02888): of what the ranks add to it, one bit an element travels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.work import SequentialWork, Work
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.optimizer import AdamWTable
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.codecs import Sign
from hpctrain.sharding.compression.compressed_reduction import CompressedReduction
from hpctrain.sharding.reducer import ExactReduction
from hpctrain.sharding.state import StateTensor, state_of_ranks


class OneBitMomentum:
    """Exact sums for `warmup` updates, afterwards the momentum that AdamW goes on with, and not gradients.

    Of the momentum m every rank has a part a, such that the parts of all add up to it: a = beta a +
    (1 - beta) g of its own gradients, which is all that happens in the warm-up. Afterwards m is the two-way
    sum of signs of these, with both residuals, whole on all ranks with ZeRO too, and a = m / ranks: what the
    codes lose of the momentum is not lost to the next one. A rank alone has a for the sum.
    """

    def __init__(self, bucket: Bucket, beta: float, warmup: int) -> None:
        self.bucket, self.beta, self.warmup = bucket, beta, warmup
        self.exact = ExactReduction(bucket)
        self.signs = (
            CompressedReduction(bucket, Sign(), True, whole=True) if bucket.sharding.group.size > 1 else None
        )
        self.part = torch.zeros(bucket.length, device=bucket.sharding.group.device)
        self._warm = True

    @staticmethod
    def of(deck: Deck, bucket: Bucket) -> OneBitMomentum:
        """That of a deck, whose optimizer is AdamW."""
        rule = deck.optimizer.rule
        assert isinstance(rule, AdamWTable)
        return OneBitMomentum(bucket, rule.beta1, deck.communication.warmup)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that the sum uses while it is in flight, without gradients and sums."""
        if self.signs is None:
            return 0
        wide = 0 if self.bucket.gradient_dtype == torch.float32 else 4 * self.bucket.length
        return max(self.exact.scratch_bytes, self.signs.scratch_bytes + wide)

    def begin(self, updates: int) -> None:
        """Begin a step."""
        self._warm = updates < self.warmup

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum the gradients of the bucket over the ranks of its group."""
        if not self._warm and self.signs is not None:
            return SequentialWork(self._sum(self.signs, gradients), sums)
        self.part.mul_(self.beta).add_(gradients, alpha=1 - self.beta)
        if not self._warm:
            gradients.copy_(self.part)
        return self.exact.start(gradients, sums)

    def after_step(self, updated: bool, factor: float) -> None:
        """See Summation. What becomes of the momentum, a step that is skipped does not tell."""
        if self.signs is not None and not self._warm:
            if updated and self.signs.summed is not None:
                self.signs.decode_into(self.part)
                self.part.div_(self.bucket.sharding.group.size)
        elif not updated:
            self.part.zero_()
        if factor != 1:
            self.part.mul_(factor)
        if self.signs is not None:
            self.signs.after_step(updated, factor)

    def state(self) -> Iterator[StateTensor]:
        """Yield all tensors of the state. They are the same tensors in every step."""
        yield from state_of_ranks("reducer/mean", self.part, self.bucket, "optimizer/exp_avg")
        if self.signs is not None:
            yield from self.signs.state()

    def _sum(self, signs: CompressedReduction, gradients: Tensor) -> Iterator[Work[Any]]:
        """The operations on what this rank adds to the momentum."""
        wide = gradients if gradients.dtype == torch.float32 else gradients.float()
        wide.mul_(1 - self.beta).add_(self.part, alpha=self.beta)
        yield from signs.operations(wide, wide)
        if wide is not gradients:
            gradients.copy_(wide)
