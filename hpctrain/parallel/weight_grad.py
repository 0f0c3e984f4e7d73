"""Weight gradients that may be computed later than the input gradient (arXiv 2401.10241)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class WeightGradientQueue:
    """Holds weight-gradient computations back while `deferring`; `run` computes them in order."""

    def __init__(self) -> None:
        self.deferring = False
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, compute: Callable[[], None]) -> None:
        """Compute now, or keep for `run` while deferring."""
        if self.deferring:
            self._waiting.append(compute)
        else:
            compute()

    def run(self, count: int | None = None) -> None:
        """Compute the oldest `count` waiting gradients, all of them by default."""
        with torch.no_grad():
            for _ in range(len(self._waiting) if count is None else count):
                self._waiting.popleft()()
