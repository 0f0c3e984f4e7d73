"""The global gradient norm, which counts every logical element once, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.parallel.shard import Shard
from hpctrain.sharding.bucket import Bucket


def counts_here(shard: Shard, tensor_rank: int) -> bool:
    """Whether this tensor rank counts the piece: the first of all ranks that hold the same one."""
    if shard.stage_copy > 0:
        return False
    return shard.copy == 0 if "tensor" in shard.split else tensor_rank == 0


def local_square_norm(buckets: Sequence[Bucket], tensor_rank: int) -> Tensor:
    """Sum of squares, fp64 0-dim, of the gradients that this rank counts."""
    gradients = [
        segment.view(bucket.gradients)
        for bucket in buckets
        for segment in bucket.segments
        if segment.parameter.requires_grad and counts_here(segment.parameter.shard, tensor_rank)
    ]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=buckets[0].gradients.device)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()


def clip_coefficient(norm: float, limit: float) -> float:
    """The factor that brings a gradient of norm `norm` down to `limit`; 1 with limit 0 (off)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
