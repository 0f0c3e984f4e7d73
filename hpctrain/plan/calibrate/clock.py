"""Measuring on all ranks at once, since those of a node share its memory and power."""

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
    """Repeats what is measured for about so many `seconds`, and keeps what measurements were apart.

    What is measured by a name of one kind, as "products", counts together there.
    """

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.budget = world, seconds
        self._shares: dict[str, list[float]] = {}

    def now(self) -> float:
        """Seconds, once the device has done what it was given."""
        synchronize(self.world.device)
        return perf_counter()

    def seconds(self, kind: str, run: Callable[[], object]) -> float:
        """Of what is done by `run`, see `laps`."""

        def lap() -> tuple[float]:
            began = self.now()
            run()
            return (self.now() - began,)

        return self.laps(kind, lap)[0]

    def laps(self, kind: str, run: Callable[[], Sequence[float]]) -> list[float]:
        """Of each of the seconds that `run` gives the slowest rank's mean: means add up to those of a whole.
        Collective: all ranks repeat it as often, at the same time.
        """
        return self._repeated(kind, run, self.world.everyone, together=False)

    def of_group(self, kind: str, group: Group, run: Callable[[], object]) -> float:
        """Mean of the slowest rank's seconds of what a group does together. Collective over the group."""

        def lap() -> tuple[float]:
            group.barrier()
            began = self.now()
            run()
            return (self.now() - began,)

        return self._repeated(kind, lap, group, together=True)[0]

    def spread(self) -> dict[str, tuple[float, float]]:
        """By kind the shares of their median below which one tenth, and nine tenths, of measurements were."""
        return {kind: _tenths(shares) for kind, shares in self._shares.items()}

    def _repeated(
        self, kind: str, run: Callable[[], Sequence[float]], group: Group, together: bool
    ) -> list[float]:
        run()
        longest = _most(group, [sum(run())])[0]
        count = max(_LEAST, min(_MOST, int(self.budget / max(longest, 1e-9))))
        samples = [list(run()) for _ in range(count)]
        columns = [list(column) for column in zip(*samples, strict=True)]
        if together:  # all wait for the slowest one
            columns = [_most(group, column) for column in columns]
        middles = [median(column) for column in columns]
        for column, middle in zip(columns, middles, strict=True):
            self._shares.setdefault(kind, []).extend(each / middle for each in column if middle > 0)
        means = [fmean(column) for column in columns]
        return means if together else _most(group, means)


def _most(group: Group, figures: Sequence[float]) -> list[float]:
    if group.size == 1:
        return list(figures)
    found: list[float] = group.all_reduce(torch.tensor(figures, dtype=torch.float64), "max").tolist()
    return found


def _tenths(shares: Sequence[float]) -> tuple[float, float]:
    if len(shares) < 2:
        return 1.0, 1.0
    tenths = quantiles(shares, n=10, method="inclusive")
    return tenths[0], tenths[-1]
