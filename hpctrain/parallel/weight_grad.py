"""Weight gradients that may be computed later than the input gradient (arXiv 2401.10241)."""

from __future__ import annotations

from collections.abc import Callable

import torch

Computation = Callable[[], None]


class WeightGradientQueue:
    """Holds weight-gradient computations back while `deferring`; `take` hands them over."""

    def __init__(self) -> None:
        self.deferring = False
        self._waiting: list[Computation] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, compute: Computation) -> None:
        """Compute now, or keep for `take` while deferring."""
        if self.deferring:
            self._waiting.append(compute)
        else:
            compute()

    def take(self) -> list[Computation]:
        """The computations held back since the last call, for `compute_all`."""
        waiting, self._waiting = self._waiting, []
        return waiting


def compute_all(computations: list[Computation]) -> None:
    """Do what was held back, in its order, outside autograd."""
    with torch.no_grad():
        for compute in computations:
            compute()
