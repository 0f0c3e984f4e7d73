"""Square sums of gradients, and what takes those of some of a step's tokens before others' are added."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.host.device import on_host
from hpctrain.parallel.shard import Parameter
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.reducer import GradientReduction

_PIECE = 1 << 16
"""Elements that a CPU squares in fp64 at a time: few enough for the cache."""

_ROWS = 1024
"""Rows of a table that are added up at a time."""


def square_sum(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares, fp64 0-dim, of flat gradients on the device.

    The sum is one in fp64, so that single precision does not show how they were cut.
    """
    counted = list(gradients)
    if counted and not on_host(device):
        return torch.stack(torch._foreach_norm(counted, 2, torch.float64)).square().sum()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for elements in counted:
        for piece in elements.split(_PIECE):
            squares = piece.double()
            total += torch.dot(squares, squares)
    return total


class MeasuredReduction:
    """Another GradientReduction, before which it takes the square sum of what this rank sums.

    `squares`, fp64 0-dim, is that of a step with one sum. Of ranks that compute on the same tokens, and of
    stages that hold the same tensor, one counts what they have in common; ranks with other tokens have
    gradients of their own, and each counts these.
    """

    def __init__(self, bucket: Bucket, summation: GradientReduction) -> None:
        self.bucket, self.summation = bucket, summation
        self.squares = square_sum((), bucket.sharding.group.device)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that the sum uses while it is in flight, without gradients and sums."""
        return self.summation.scratch_bytes

    def begin(self, updates: int) -> None:
        """Begin a step."""
        self.summation.begin(updates)

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum the gradients of the bucket over the ranks of its group."""
        if not gradients.is_meta:
            self.squares = square_sum(self._counted(gradients), gradients.device)
        return self.summation.start(gradients, sums)

    def after_step(self, updated: bool, factor: float) -> None:
        """End a step."""
        self.summation.after_step(updated, factor)

    def _counted(self, gradients: Tensor) -> Iterator[Tensor]:
        """The gradients that this rank counts, by parameter."""
        other_tokens = self.bucket.sharding.group, self.bucket.sharding.replicas
        for segment, elements, _ in self.bucket.cut(gradients, slice(0, self.bucket.length)):
            first = segment.replication.copy(False, *other_tokens)[0] == 0
            if segment.parameter.requires_grad and first:
                yield elements


class FirstMicroBatch:
    """`squares`, fp64 0-dim, are those of the gradients of a step's first micro-batch, on a rank that has all
    tokens and all of the model: of each parameter's when it has them, before those of the next are added.
    """

    def __init__(self, device: torch.device) -> None:
        self.squares = square_sum((), device)
        self._additions: dict[Parameter, int] = {}

    def begin(self) -> None:
        """A step begins."""
        self.squares = torch.zeros_like(self.squares)
        self._additions.clear()

    def added(self, parameter: Parameter) -> None:
        """Note one addition to a parameter's gradient."""
        additions = self._additions[parameter] = self._additions.get(parameter, 0) + 1
        gradient, lookups = parameter.gradient, parameter.lookups
        assert gradient is not None
        if additions != parameter.uses or gradient.is_meta:
            return
        if lookups is None:
            self.squares += square_sum([gradient.flatten()], gradient.device)
            return
        for piece, other in zip(gradient.split(_ROWS), lookups.split(_ROWS), strict=True):
            self.squares += square_sum([(piece + other).flatten()], gradient.device)
