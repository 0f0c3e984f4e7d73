"""Time measurement on all ranks at once, since the ranks of a node share its memory and power."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median, quantiles
from time import perf_counter

import torch

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.host.device import synchronize

_LEAST, _MOST = 3, 50


class Clock:
    """Repeats a measurement for some seconds and records its spread.

    Measurements of the same kind count together.

    Args:
        world: All ranks.
        seconds: Seconds for which a measurement is repeated.

    Attributes:
        world: All ranks.
        budget: Seconds for which a measurement is repeated.
    """

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.budget = world, seconds
        self._shares: dict[str, list[float]] = {}

    def now(self) -> float:
        """Return the time in seconds after the device has finished its work."""
        synchronize(self.world.device)
        return perf_counter()

    def seconds(self, kind: str, run: Callable[[], object]) -> float:
        """Return the seconds of `run`, as `mean_seconds` measures them. Collective."""

        def measure() -> tuple[float]:
            start = self.now()
            run()
            return (self.now() - start,)

        return self.mean_seconds(kind, measure)[0]

    def mean_seconds(self, kind: str, run: Callable[[], Sequence[float]]) -> list[float]:
        """Return the means of the seconds that `run` returns, each of the slowest rank. Collective.

        All ranks repeat it equally often, at the same time. Means add up to the mean of the sum.
        """
        return self._repeated(kind, run, self.world.everyone, together=False)

    def group_seconds(self, kind: str, group: Group, run: Callable[[], object]) -> float:
        """Return the mean seconds of what a group does together. Collective over the group.

        The seconds are those of its slowest rank.
        """

        def measure() -> tuple[float]:
            group.barrier()
            start = self.now()
            run()
            return (self.now() - start,)

        return self._repeated(kind, measure, group, together=True)[0]

    def spread(self) -> dict[str, tuple[float, float]]:
        """Return the 10th and 90th percentile of the measurements of each kind, relative to their median."""
        return {kind: _percentiles(shares) for kind, shares in self._shares.items()}

    def _repeated(
        self, kind: str, run: Callable[[], Sequence[float]], group: Group, together: bool
    ) -> list[float]:
        run()
        longest = _largest(group, [sum(run())])[0]
        count = max(_LEAST, min(_MOST, int(self.budget / max(longest, 1e-9))))
        samples = [list(run()) for _ in range(count)]
        columns = [list(column) for column in zip(*samples, strict=True)]
        if together:  # all wait for the slowest one
            columns = [_largest(group, column) for column in columns]
        for column in columns:
            middle = median(column)
            self._shares.setdefault(kind, []).extend(each / middle for each in column if middle > 0)
        means = [fmean(column) for column in columns]
        return means if together else _largest(group, means)


def _largest(group: Group, numbers: Sequence[float]) -> list[float]:
    if group.size == 1:
        return list(numbers)
    result: list[float] = group.all_reduce(torch.tensor(numbers, dtype=torch.float64), "max").tolist()
    return result


def _percentiles(shares: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile."""
    if len(shares) < 2:
        return 1.0, 1.0
    tenths = quantiles(shares, n=10, method="inclusive")
    return tenths[0], tenths[-1]
