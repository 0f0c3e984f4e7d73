"""Distribution of a bucket among ranks when matrices must not be split between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_ROUNDS = 32
"""Number of bisections in the search for the smallest possible maximum load."""


class UpdateUnit(NamedTuple):
    """Neighbouring elements of a bucket that must belong to one rank.

    Attributes:
        stop: End of the elements. They begin where those of the previous unit end.
        work: FLOPs of their update.
    """

    stop: int
    work: float


class UpdateLoads:
    """Number of FLOPs of the updates that each of `size` ranks does in all buckets so far.

    It depends on shapes alone, so it is the same on all ranks, which must pass the buckets in the same order.
    In each bucket, the slices follow each other by rank. Ranks that have little work get more of the next
    buckets. A bucket may have fewer units than there are ranks.
    """

    def __init__(self, size: int) -> None:
        self.works = [0.0] * size

    def cut(self, units: Sequence[UpdateUnit], length: int) -> tuple[int, ...]:
        """Return the boundaries of the ranks' shares of a bucket: 0, ..., `length`; equal ones without units.

        The work of the units is added to the loads.
        """
        size = len(self.works)
        if not units:
            return tuple(length // size * rank for rank in range(size + 1))
        total = sum(unit.work for unit in units)
        # The smallest possible maximum is at least the mean load, and at most the maximum plus all new work.
        low, high = (sum(self.works) + total) / size, (max(self.works) + total) * (1 + 1e-9)
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._fill(units, middle) is not None else (middle, high)
        counts = self._fill(units, high)
        assert counts is not None
        borders, assigned = [0], 0
        for rank, count in enumerate(counts):
            owned = units[assigned : assigned + count]
            self.works[rank] += sum(unit.work for unit in owned)
            assigned += count
            borders.append(owned[-1].stop if owned else borders[-1])
        borders[-1] = length
        return tuple(borders)

    def _fill(self, units: Sequence[UpdateUnit], most: float) -> list[int] | None:
        """Return the number of units of each rank if none exceeds the load `most`; None if units remain."""
        counts, assigned = [], 0
        for before in self.works:
            first, load = assigned, before
            while assigned < len(units) and load + units[assigned].work <= most:
                load += units[assigned].work
                assigned += 1
            counts.append(assigned - first)
        return counts if assigned == len(units) else None
