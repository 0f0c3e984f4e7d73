"""Overlap of communication with matrix products, and waiting of ranks for each other."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from hpctrain.comm.group import Group
from hpctrain.plan.calibrate.clock import Clock

_SIDE = 128
"""Rows and columns of matrices whose product takes much less time than the measured communication."""

_LEAST, _MOST = 3, 50
_REPETITION_FACTOR = 20
"""Factor by which measurements are repeated more often than others, since differences are small."""

_MOST_PRODUCTS = 500
_REDUCTIONS, _SECONDS_BETWEEN = 8, 8e-3
"""Number of reductions, and seconds of computation before each, about as in layers."""


def measure_overlap(group: Group, size: int, tests_between_products: bool, clock: Clock) -> float:
    """Return the share of an all-reduce that products of twice its time hide. Collective.

    Args:
        group: The ranks.
        size: Bytes of the all-reduce.
        tests_between_products: True to test between products if it is complete, as gradient reductions do.
        clock: The clock.
    """
    products = _Products(group)
    tensor = group.empty((max(1, size // 4),), torch.float32).zero_()
    reduction_seconds = clock.group_seconds("overlap", group, lambda: group.all_reduce(tensor))
    count = products.count_for(2 * reduction_seconds, clock)

    def both() -> None:
        work = group.start_all_reduce(tensor)
        for _ in range(count):
            products.one()
            if tests_between_products:
                work.test()
        work.wait()

    pairs = paired(group, clock, lambda: products.run(count), both)
    return median(
        min(1.0, max(0.0, (products_seconds + reduction_seconds - joint_seconds) / reduction_seconds))
        for products_seconds, joint_seconds in pairs
    )


def measure_waits(group: Group, size: int, clock: Clock) -> float:
    """Return how long ranks wait for the slowest one before an all-reduce, as a share of their computation.

    Collective.

    Args:
        group: The ranks.
        size: Bytes of the all-reduce.
        clock: The clock.
    """
    products = _Products(group)
    tensor = group.empty((max(1, size // 4),), torch.float32).zero_()
    reduction_seconds = clock.group_seconds("waits", group, lambda: group.all_reduce(tensor))
    count = products.count_for(_SECONDS_BETWEEN if clock.budget else 0.0, clock)

    def reduce_after_products() -> None:
        for _ in range(_REDUCTIONS):
            products.run(count)
            group.all_reduce(tensor)

    pairs = paired(group, clock, lambda: products.run(_REDUCTIONS * count), reduce_after_products)
    shares = [
        (joint_seconds - products_seconds - _REDUCTIONS * reduction_seconds) / products_seconds
        for products_seconds, joint_seconds in pairs
    ]
    return min(1.0, max(0.0, median(shares)))


class _Products:
    """Small matrix products, one after the other."""

    def __init__(self, group: Group) -> None:
        self._operands = [torch.randn(_SIDE, _SIDE, device=group.device) for _ in range(2)]
        self._result, self._group = torch.empty(_SIDE, _SIDE, device=group.device), group

    def one(self) -> None:
        torch.mm(*self._operands, out=self._result)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.one()

    def count_for(self, seconds: float, clock: Clock) -> int:
        """Return how many products take a number of seconds, the same on all ranks. It is limited."""
        count = 16
        one = clock.group_seconds("overlap", self._group, lambda: self.run(count)) / count
        return max(1, min(_MOST_PRODUCTS, int(seconds / one)))


def paired(
    group: Group, clock: Clock, first: Callable[[], object], second: Callable[[], object]
) -> list[tuple[float, float]]:
    """Return the seconds of two functions on the slowest rank, which take turns. Collective.

    Disturbances of the machine affect both in the same way.
    """
    both = first, second
    longest = sum(clock.group_seconds("overlap", group, run) for run in both)
    count = max(_LEAST, min(_MOST, int(_REPETITION_FACTOR * clock.budget / max(longest, 1e-9))))
    seconds = torch.zeros(count, 2, dtype=torch.float64)
    for number in range(count):
        for which, run in enumerate(both):
            group.barrier()
            start = clock.now()
            run()
            seconds[number, which] = clock.now() - start
    slowest = group.all_reduce(seconds, "max").tolist()
    return [(one, other) for one, other in slowest]
