"""Weight gradients that may be computed later than the input gradient (arXiv 2401.10241)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeferredGradient:
    """A computation that waits; `watched` is what a watch on its tensors returned, held with it."""

    compute: Callable[[], None]
    watched: Sequence[object] = ()


class WeightGradientQueue:
    """Holds weight-gradient computations back while `deferring`; `take` hands them over.

    `running` says that what autograd does is a backward pass of the run. `watch`, if set, is called with
    every tensor that a computation held back needs.
    """

    def __init__(self) -> None:
        self.deferring = self.running = False
        self.watch: Callable[[Tensor], object] | None = None
        self._waiting: list[DeferredGradient] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def backward(self, deferring: bool = False) -> Iterator[None]:
        """A backward pass of the run goes by within."""
        self.running, self.deferring = True, deferring
        try:
            yield
        finally:
            self.running = self.deferring = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What autograd does within is no backward pass of the run: a module's own."""
        running, self.running = self.running, False
        try:
            yield
        finally:
            self.running = running

    def submit(self, compute: Callable[[], None], *tensors: Tensor) -> None:
        """Compute now, or keep for `take` while deferring. `tensors` are what the computation holds."""
        if self.deferring:
            watched = [self.watch(tensor) for tensor in tensors] if self.watch is not None else ()
            self._waiting.append(DeferredGradient(compute, watched))
        else:
            compute()

    def take(self) -> list[DeferredGradient]:
        """The computations held back since the last call, for `compute_all`."""
        waiting, self._waiting = self._waiting, []
        return waiting


def compute_all(computations: list[DeferredGradient]) -> None:
    """Do what was held back, in its order, outside autograd."""
    with torch.no_grad():
        for computation in computations:
            computation.compute()
