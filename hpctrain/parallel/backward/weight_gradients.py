"""Weight gradients that are computed later than input gradients (zero bubble, arXiv 2401.10241).

The backward pass of a layer computes the gradient of its input at once, because the stage before waits for
it. A schedule may defer the gradients of the weights and fill idle time with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeferredGradient:
    """Computation of a weight gradient that has been deferred.

    Attributes:
        compute: Computes the gradient and adds it to the buffer.
        watched: Results of `WeightGradientQueue.watch` for its tensors, kept as long as the computation.
    """

    compute: Callable[[], None]
    watched: Sequence[object] = ()


class WeightGradientQueue:
    """Queue of the weight gradients that the layers of one rank submit.

    Attributes:
        deferring: True while submitted computations are queued instead of being computed at once.
        running: True during a backward pass that the executor starts, False in one that a user's module
            starts.
        watch: Called with each tensor that a queued computation needs. May be None.
    """

    def __init__(self) -> None:
        self.deferring = self.running = False
        self.watch: Callable[[Tensor], object] | None = None
        self._queued: list[DeferredGradient] = []

    def __len__(self) -> int:
        return len(self._queued)

    @contextmanager
    def backward(self, deferring: bool = False) -> Iterator[None]:
        """Return a context for a backward pass of a training step."""
        self.running, self.deferring = True, deferring
        try:
            yield
        finally:
            self.running = self.deferring = False

    @contextmanager
    def outside_run(self) -> Iterator[None]:
        """Return a context for a backward pass inside a user's module, not one of the training step."""
        running, self.running = self.running, False
        try:
            yield
        finally:
            self.running = running

    def submit(self, compute: Callable[[], None], *tensors: Tensor) -> None:
        """Compute a gradient now, or queue the computation if gradients are deferred.

        Args:
            compute: The computation.
            tensors: Tensors that the computation keeps.
        """
        if self.deferring:
            watched = [self.watch(tensor) for tensor in tensors] if self.watch is not None else ()
            self._queued.append(DeferredGradient(compute, watched))
        else:
            compute()

    def take(self) -> list[DeferredGradient]:
        """Remove and return the queued computations, for `compute_all`."""
        queued, self._queued = self._queued, []
        return queued


def compute_all(computations: list[DeferredGradient]) -> None:
    """Compute deferred gradients in the order in which they were submitted, without a graph."""
    with torch.no_grad():
        for computation in computations:
            computation.compute()
