"""Reduction of a bucket's gradients over the ranks that share it.

A GradientReduction sums the gradients: exactly (ExactReduction) or with fewer bytes (`compression`). A
Reducer decides where the sums are stored. With `layout.zero` 0 they replace the gradients on all ranks, with
1 in each rank's slice. With 2 and 3 each rank keeps its slice, and the memory of all other gradients returns
to the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import Work
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.gradient_squares import local_square_sum
from hpctrain.sharding.state import StateTensor


class GradientReduction(Protocol):
    """Sum of the gradients of one bucket over ranks. It may have state of its own.

    The result for a parameter must depend only on the gradients of that parameter, because other ranks may
    hold it next to other parameters. Zeros must stay zeros. The next `start` may come before the previous
    handle was waited for. In plans, tensors have no values.
    """

    def begin(self, updates: int) -> None:  # noqa: ARG002
        """Begin a step. By default nothing happens.

        Args:
            updates: Number of updates of the whole run so far, including those before a resume.
        """
        return

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum the gradients of the bucket over the ranks of its group. Collective.

        Args:
            gradients: The gradients, which may be overwritten. They may be not finite if the step will be
                skipped.
            sums: Memory for this rank's slice of the sums. Without ZeRO and with stage 1 it is `gradients` or
                this rank's slice of it. Only these stages compress gradients.

        Returns:
            Handle whose result is `sums`.
        """

    def end_step(self, updated: bool, scale_ratio: float) -> None:  # noqa: ARG002
        """End a step. By default nothing happens.

        Args:
            updated: False if the step was skipped.
            scale_ratio: Ratio of the next step's loss scale to this step's.
        """
        return

    def state(self) -> Iterator[StateTensor]:
        """Yield all tensors of the state, the same ones in every step. By default there are none."""
        yield from ()


def rescale_residuals(residuals: Iterable[Tensor | None], updated: bool, scale_ratio: float) -> None:
    """Adapt residuals to the end of a step: discard them if it was skipped, else apply the new loss scale."""
    for residual in residuals:
        if residual is not None and not updated:
            residual.zero_()
        elif residual is not None and scale_ratio != 1:
            residual.mul_(scale_ratio)


class ExactReduction(GradientReduction):
    """Sum of gradients in their own format, by all-reduce or reduce-scatter."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.group = bucket, bucket.sharding.group

    @override
    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        if sums is gradients:
            return self.group.start_all_reduce(gradients)
        return self.group.start_reduce_scatter(gradients, sums, self.bucket.layout.sizes)


class UnreducedGradients(GradientReduction):
    """GradientReduction that does nothing, because other ranks reduce the gradients.

    These are parameter servers, or the rank of this node that exchanges a bucket with other nodes.
    """

    @override
    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        assert sums is gradients, "the gradients become sums in place"
        return Work(sums)


class Reducer:
    """Reduction of a bucket's gradients to where its stage of ZeRO stores their sums.

    With stages 2 and 3 it may reduce after each micro-batch. Then the first sums are stored in place, and
    later ones are added.

    Args:
        bucket: The bucket.
        reduction: How gradients are summed.
        computes_squares: True if it also computes the square sum of this rank's gradients (noise scale).

    Attributes:
        repeats: True if it may reduce several times in a step, and adds the sums.
        squares: Square sum of the gradients of the last `start`, fp64 0-dim, if it `computes_squares`.
    """

    def __init__(self, bucket: Bucket, reduction: GradientReduction, computes_squares: bool = False) -> None:
        self.bucket, self.reduction, self.computes_squares = bucket, reduction, computes_squares
        self.squares = torch.zeros((), dtype=torch.float64, device=bucket.sharding.group.device)
        self.repeats = bucket.sharding.zero > 1
        self._in_flight: deque[tuple[Tensor, Tensor]] = deque()
        self._first = True

    def begin(self, updates: int) -> None:
        """Begin a step, after this number of updates of the run."""
        self.reduction.begin(updates)
        self._first = True

    def start(self) -> Work[Tensor]:
        """Start to reduce the bucket's final gradients. `complete` follows. Collective over the group."""
        bucket, gradients = self.bucket, self.bucket.final_gradients()
        if self.computes_squares and not gradients.is_meta:
            self.squares = local_square_sum(bucket, gradients)
        if bucket.sharding.zero == 0:
            sums = gradients
        elif self.repeats and self._first:
            sums = bucket.owned_gradients
        else:
            sums = gradients[bucket.slice]
        if self.repeats:
            bucket.take_gradients()
        self._first = False
        self._in_flight.append((gradients, sums))
        return self.reduction.start(gradients, sums)

    def complete(self) -> None:
        """Finish the earliest `start`, after its handle is complete.

        Then `owned_gradients` of the bucket are sums.
        """
        gradients, sums = self._in_flight.popleft()
        if self.repeats:
            if sums is not self.bucket.owned_gradients:
                self.bucket.owned_gradients.add_(sums)
            self.bucket.sharding.pool.give(gradients)
