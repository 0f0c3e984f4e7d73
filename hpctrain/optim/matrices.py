"""An optimizer whose rule updates whole matrices, gathered from the ranks that hold pieces of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.optim.optimizer import Elements, Optimizer, UpdateRule, resident_state
from hpctrain.parallel.shard import Shard
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment

_GRADIENTS = "gradients"


class MatrixOptimizer(Optimizer):
    """Keeps each rank's own elements of the state, as ResidentOptimizer does.

    All ranks that hold elements of a parameter gather it, its gradient and its state in the whole tensor's
    shape, update them alike, and keep their own. What is not trained stays as it is.
    """

    def __init__(self, rule: UpdateRule, buckets: Sequence[Bucket]) -> None:
        """Collective."""
        self._own = [resident_state(rule, bucket) for bucket in buckets]
        super().__init__(rule, buckets, self._own)
        self.updates = 0
        self._tensors = [_tensors(bucket) for bucket in buckets]

    @property
    def working_bytes(self) -> int:
        """Host memory that a bucket's state and gradients are gathered in, and a parameter's joined."""
        names = 1 + len(self._own[0])
        elements: int = max(
            (bucket.own.stop - bucket.own.start) * (bucket.gradient_dtype != torch.float32)
            + names * bucket.length * (bucket.sharding.zero > 0)
            + max(tensor.working_elements(names) for tensor in tensors)
            for bucket, tensors in zip(self.buckets, self._tensors, strict=True)
        )
        return 4 * elements

    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """See Optimizer."""
        for bucket, state, tensors in zip(self.buckets, self._own, self._tensors, strict=True):
            self._update_bucket(bucket, state, tensors, learning_rate, gradient_divisor)
        self.updates += 1
        self.publish()

    def _update_bucket(
        self, bucket: Bucket, state: Mapping[str, Tensor], tensors: Sequence[_CutTensor], *how: float
    ) -> None:
        own = {**state, _GRADIENTS: bucket.own_gradients.float()}
        gathered = {name: bucket.gathered(flat) for name, flat in own.items()}
        pieces = zip(*(bucket.owned(flat) for flat in own.values()), strict=True)
        for tensor, of_names in zip(tensors, pieces, strict=True):
            segment, _, offset = of_names[0]
            if segment.parameter.requires_grad:
                whole = self._updated(tensor, segment, gathered, *how)
                for name, (_, mine, _) in zip(own, of_names, strict=True):
                    part = slice(offset, offset + mine.numel())
                    mine.copy_(tensor.shard.take(whole.pop(name)).reshape(-1)[part])

    def _updated(
        self, tensor: _CutTensor, segment: BucketSegment, gathered: Mapping[str, Tensor], *how: float
    ) -> dict[str, Tensor]:
        """All of a parameter, its state and its gradient by name."""
        whole = {name: tensor.join(segment.view(flat)) for name, flat in gathered.items()}
        updated = {name: values for name, values in whole.items() if name != _GRADIENTS}
        updates = torch.tensor(float(self.updates), device=whole[_GRADIENTS].device)
        how_treated = segment.parameter.treatment
        self.rule.update([Elements(updated, whole[_GRADIENTS], updates, how_treated, tensor.shard)], *how)
        return whole


@dataclass(frozen=True)
class _CutTensor:
    """A tensor of which the ranks of `group`, if any, hold pieces of one shape that begin at `starts`."""

    shard: Shard
    group: Group | None
    starts: Sequence[Sequence[int]]

    def working_elements(self, names: int) -> int:
        """Of what is there at a time where it is joined for so many names, and cut again for one."""
        ranks = 0 if self.group is None else self.group.size
        return names * prod(self.shard.shape) * (ranks > 0) + max(1, ranks) * self.shard.elements

    def join(self, piece: Tensor) -> Tensor:
        """All of it, of this rank's piece. Collective over the group."""
        if self.group is None:
            return piece
        whole = piece.new_empty(self.shard.shape)
        for start, other in zip(self.starts, self.group.all_gather(piece.unsqueeze(0)), strict=True):
            into = whole[tuple(slice(at, at + size) for at, size in zip(start, other.shape, strict=True))]
            into.copy_(other[tuple(slice(0, size) for size in into.shape)])
        return whole


def _tensors(bucket: Bucket) -> list[_CutTensor]:
    """Those of a bucket's segments. Collective."""
    tensors = []
    for segment in bucket.segments:
        shard, group = segment.parameter.shard, segment.replication.pieces
        starts = [] if group is None else group.all_gather_object(shard.start)
        tensors.append(_CutTensor(shard, group, starts))
    return tensors
