"""1-bit Adam (arXiv 2102.02888), which exchanges the momentum with one bit per element."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import SequentialWork, Work
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.codecs import SignCodec
from hpctrain.sharding.compression.compressed_reduction import CompressedReduction
from hpctrain.sharding.reducer import ExactReduction, GradientReduction
from hpctrain.sharding.state import StateTensor, state_of_ranks


class OneBitMomentum(GradientReduction):
    """Exact sums for `warmup` updates, afterwards the momentum of AdamW in place of gradients.

    Each rank has a part a of the momentum m, such that the parts of all ranks add up to m. With its own
    gradients g it computes a = beta a + (1 - beta) g. During the warm-up nothing else happens. Afterwards the
    ranks encode a as signs with error feedback, and sum the codes. All ranks receive the encoded sum m, also
    with ZeRO, and continue with a = m / ranks. On a single rank m is a.
    """

    def __init__(self, bucket: Bucket, beta: float, warmup: int) -> None:
        self.bucket, self.beta, self.warmup = bucket, beta, warmup
        self.exact = ExactReduction(bucket)
        is_only_rank = bucket.sharding.group.size == 1
        self.signs = None if is_only_rank else CompressedReduction(bucket, SignCodec(), True, replicate=True)
        self.part = torch.zeros(bucket.length, device=bucket.sharding.group.device)
        self._warming_up = True

    @override
    def begin(self, updates: int) -> None:
        self._warming_up = updates < self.warmup

    @override
    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        if not self._warming_up and self.signs is not None:
            return SequentialWork(self._sum(self.signs, gradients), sums)
        self.part.mul_(self.beta).add_(gradients, alpha=1 - self.beta)
        if not self._warming_up:
            gradients.copy_(self.part)
        return self.exact.start(gradients, sums)

    @override
    def end_step(self, updated: bool, scale_ratio: float) -> None:
        # The parts of the momentum follow the sums only after an update.
        if self.signs is not None and not self._warming_up:
            if updated and self.signs.sum_code is not None:
                self.signs.decode_into(self.part)
                self.part.div_(self.bucket.sharding.group.size)
        elif not updated:
            self.part.zero_()
        if scale_ratio != 1:
            self.part.mul_(scale_ratio)
        if self.signs is not None:
            self.signs.end_step(updated, scale_ratio)

    @override
    def state(self) -> Iterator[StateTensor]:
        yield from state_of_ranks("reducer/mean", self.part, self.bucket, "optimizer/exp_avg")
        if self.signs is not None:
            yield from self.signs.state()

    def _sum(self, signs: CompressedReduction, gradients: Tensor) -> Iterator[Work[Any]]:
        """Yield the operations that sum the new momentum."""
        wide = gradients if gradients.dtype == torch.float32 else gradients.float()
        wide.mul_(1 - self.beta).add_(self.part, alpha=self.beta)
        yield from signs.operations(wide, wide)
        if wide is not gradients:
            gradients.copy_(wide)
