"""What of a communication hides behind products that are computed meanwhile, and what ranks wait to meet."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from hpctrain.comm.group import Group
from hpctrain.plan.calibrate.clock import Clock

_SIDE = 128
"""Of products that take much less time than what is measured beside them."""

_LEAST, _MOST = 3, 50
_PATIENCE = 20
"""Times as long as other measurements are repeated: what is told are small differences."""

_MOST_PRODUCTS = 500
_MEETINGS, _BETWEEN = 8, 8e-3
"""Meetings of ranks, and seconds that they compute before each, as layers do about."""


def measure_overlap(group: Group, size: int, asked: bool, clock: Clock) -> float:
    """The share of an all-reduce of `size` bytes that products hide, which take about twice as long. Where it
    is `asked` how far it is, between products, as sums of gradients are, it may go on there. Collective.
    """
    products = _Products(group)
    whole = group.empty((max(1, size // 4),), torch.float32).zero_()
    alone = clock.of_group("overlap", group, lambda: group.all_reduce(whole))
    count = products.taking(2 * alone, clock)

    def both() -> None:
        work = group.start_all_reduce(whole)
        for _ in range(count):
            products.one()
            if asked:
                work.test()
        work.wait()

    laps = paired(group, clock, lambda: products.run(count), both)
    return median(min(1.0, max(0.0, (apart + alone - together) / alone)) for apart, together in laps)


def measure_waits(group: Group, size: int, clock: Clock) -> float:
    """The share of what ranks compute between two meetings that they wait for the slowest one at the second,
    where they meet to sum `size` bytes. Collective.
    """
    products = _Products(group)
    whole = group.empty((max(1, size // 4),), torch.float32).zero_()
    alone = clock.of_group("waits", group, lambda: group.all_reduce(whole))
    count = products.taking(_BETWEEN if clock.budget else 0.0, clock)

    def met() -> None:
        for _ in range(_MEETINGS):
            products.run(count)
            group.all_reduce(whole)

    laps = paired(group, clock, lambda: products.run(_MEETINGS * count), met)
    shares = [(together - apart - _MEETINGS * alone) / apart for apart, together in laps]
    return min(1.0, max(0.0, median(shares)))


class _Products:
    """Small ones, one after the other."""

    def __init__(self, group: Group) -> None:
        self._operands = [torch.randn(_SIDE, _SIDE, device=group.device) for _ in range(2)]
        self._result, self._group = torch.empty(_SIDE, _SIDE, device=group.device), group

    def one(self) -> None:
        torch.mm(*self._operands, out=self._result)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.one()

    def taking(self, seconds: float, clock: Clock) -> int:
        """How many take so long, on all ranks alike; not more than a few tens of milliseconds."""
        some = 16
        one = clock.of_group("overlap", self._group, lambda: self.run(some)) / some
        return max(1, min(_MOST_PRODUCTS, int(seconds / one)))


def paired(
    group: Group, clock: Clock, first: Callable[[], object], second: Callable[[], object]
) -> list[tuple[float, float]]:
    """Seconds of the slowest rank of both, which take turns, so that what disturbs them meets both alike.
    Collective.
    """
    both = first, second
    longest = sum(clock.of_group("overlap", group, run) for run in both)
    count = max(_LEAST, min(_MOST, int(_PATIENCE * clock.budget / max(longest, 1e-9))))
    seconds = torch.zeros(count, 2, dtype=torch.float64)
    for lap in range(count):
        for which, run in enumerate(both):
            group.barrier()
            began = clock.now()
            run()
            seconds[lap, which] = clock.now() - began
    slowest = group.all_reduce(seconds, "max").tolist()
    return [(one, other) for one, other in slowest]
