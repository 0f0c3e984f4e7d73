"""Which rank owns what of a bucket where elements that depend on each other must not be cut apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_ROUNDS = 32
"""Halvings in the search for the smallest largest load."""


class Grain(NamedTuple):
    """What has to be one rank's of a bucket: the elements up to `stop`, from where the last one stops, and
    the FLOPs of their update.
    """

    stop: int
    work: float


class UpdateLoads:
    """The FLOPs of the updates that each of `size` ranks owns, told from shapes alone: the same on all ranks.

    Buckets come in the same order on all of them. In each, ranks follow each other, since slices do; who has
    little by then is given more. What there is of one bucket may be less than one grain for each rank.
    """

    def __init__(self, size: int) -> None:
        self.works = [0.0] * size

    def cut(self, grains: Sequence[Grain], length: int) -> tuple[int, ...]:
        """The borders of the ranks' shares of a bucket: 0, ..., `length`; as long for each without grains."""
        size = len(self.works)
        if not grains:
            return tuple(length // size * rank for rank in range(size + 1))
        total = sum(grain.work for grain in grains)
        # The largest load cannot be smaller than the mean of all, nor need it be larger than this.
        low, high = (sum(self.works) + total) / size, (max(self.works) + total) * (1 + 1e-9)
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._fill(grains, middle) is not None else (middle, high)
        counts = self._fill(grains, high)
        assert counts is not None
        borders, done = [0], 0
        for rank, count in enumerate(counts):
            own = grains[done : done + count]
            self.works[rank] += sum(grain.work for grain in own)
            done += count
            borders.append(own[-1].stop if own else borders[-1])
        borders[-1] = length
        return tuple(borders)

    def _fill(self, grains: Sequence[Grain], most: float) -> list[int] | None:
        """The grains of each rank where none is to have more FLOPs than `most`; None if some remain."""
        counts, done = [], 0
        for before in self.works:
            begun, load = done, before
            while done < len(grains) and load + grains[done].work <= most:
                load += grains[done].work
                done += 1
            counts.append(done - begun)
        return counts if done == len(grains) else None
