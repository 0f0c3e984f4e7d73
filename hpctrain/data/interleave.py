"""Interleaving of several sources by their shares, with an error below one sample at any length.

Of the first n samples, for any n, a source with share w provides floor(w n) or ceil(w n). Its j-th sample (j
>= 1) has a number from floor((j-1)/w) to ceil(j/w) - 1, counted from 0: its earliest number and its deadline.
Among the sources whose next sample is not too early, the one with the first deadline is chosen. In the same
way one processor serves periodic tasks, which is possible if the shares add up to one (Baruah et al.,
"Proportionate progress", Algorithmica 1996). If two deadlines are equal, random numbers of the seed decide.
Otherwise ranks that take samples in turns could get one source each.

The choices at a number follow from the shares and the number alone. No sample waits longer than 1/w, so a
computation that starts that much earlier, from any valid state, makes the same choices. Therefore each block
of samples is computed from so far back, or from the end of the previous block.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import ceil, floor, lcm
from typing import NamedTuple

import numpy as np

from hpctrain.data.order import Integers
from hpctrain.splitmix import GOLDEN

_BLOCK = 1024
_CACHED_BLOCKS = 16
"""Number of blocks in the cache. A step and the next one, which is loaded ahead, need several."""
_MASK = (1 << 64) - 1


class InterleavedSamples(NamedTuple):
    """Sources of `_BLOCK` consecutive samples.

    Attributes:
        source: Number of the source of each sample, int64 [_BLOCK].
        nth: Number of the sample among those of its source, from 0, int64 [_BLOCK].
        before: Number of samples of each source before the block.
        after: Number of samples of each source before the end of the block.
    """

    source: Integers
    nth: Integers
    before: list[int]
    after: list[int]


class Interleaving:
    """Source of each sample, by number, for sources with given shares."""

    def __init__(self, shares: Sequence[Fraction], seed: int) -> None:
        """Interleave sources.

        Args:
            shares: Share of each source, above 0. They add up to one.
            seed: Seed that decides between samples with the same deadline.
        """
        assert shares and sum(shares) == 1 and min(shares) > 0, shares
        self.period = lcm(*(share.denominator for share in shares))
        self.shares = [share.numerator * (self.period // share.denominator) for share in shares]
        self.seed = seed * GOLDEN & _MASK
        self.back = ceil(1 / min(shares)) + 3
        self._blocks: dict[int, InterleavedSamples] = {}

    def at(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return the source of each sample at `positions` [n], and how many samples of it come before."""
        source, nth = np.empty_like(positions), np.empty_like(positions)
        numbers = positions // _BLOCK
        for number in np.unique(numbers).tolist():
            here = numbers == number
            block, inside = self._block(number), positions[here] - number * _BLOCK
            source[here], nth[here] = block.source[inside], block.nth[inside]
        return source, nth

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each source."""
        number, inside = divmod(samples, _BLOCK)
        block = self._block(number)
        more = np.bincount(block.source[:inside], minlength=len(self.shares))
        return [before + each for before, each in zip(block.before, more.tolist(), strict=True)]

    def _block(self, number: int) -> InterleavedSamples:
        known = self._blocks.pop(number, None)
        if known is None:
            first = number * _BLOCK
            before = self._blocks.get(number - 1)
            counts = list(before.after) if before is not None else self._counts_from_earlier(first)
            start = list(counts)
            source = self._choose(first, _BLOCK, counts)
            nth = np.empty(_BLOCK, np.int64)
            for each, begin in enumerate(start):
                here = source == each
                nth[here] = np.arange(begin, begin + np.count_nonzero(here))
            known = InterleavedSamples(source, nth, start, counts)
        self._blocks[number] = known  # the newest is the last
        while len(self._blocks) > _CACHED_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return known

    def _counts_from_earlier(self, samples: int) -> list[int]:
        """Return the result of `counts`, computed without a block."""
        first = max(0, samples - self.back)
        exact = [Fraction(share * first, self.period) for share in self.shares]
        counts = [floor(each) for each in exact]
        early = [self._priority(each, count) for each, count in enumerate(counts) if exact[each] != count]
        for _, _, each in sorted(early)[: first - sum(counts)]:
            counts[each] += 1
        self._choose(first, samples - first, counts)
        return counts

    def _choose(self, first: int, samples: int, counts: list[int]) -> Integers:
        """Return the sources of `samples` samples from `first` on, int64 [samples].

        Args:
            first: Number of the first sample.
            samples: Number of samples.
            counts: Number of earlier samples of each source, which is updated in place.
        """
        source = np.empty(samples, np.int64)
        waiting = [(self._earliest(each, count), each) for each, count in enumerate(counts)]
        heapify(waiting)
        ready: list[tuple[int, int, int]] = []
        for place in range(samples):
            while waiting and waiting[0][0] <= first + place:
                _, each = heappop(waiting)
                heappush(ready, self._priority(each, counts[each]))
            _, _, each = heappop(ready)
            source[place] = each
            counts[each] += 1
            heappush(waiting, (self._earliest(each, counts[each]), each))
        return source

    def _earliest(self, source: int, count: int) -> int:
        """Return the earliest number of the next sample of a source that has provided `count`."""
        return count * self.period // self.shares[source]

    def _priority(self, source: int, count: int) -> tuple[int, int, int]:
        """Return the sort key of a source's next sample: deadline, random number and source."""
        return -(-(count + 1) * self.period // self.shares[source]), self._random(source, count), source

    def _random(self, source: int, count: int) -> int:
        """Return a 64-bit random number for a sample of a source (the finalizer of SplitMix64)."""
        word = (self.seed ^ (count * GOLDEN + source * 0xD1B54A32D192ED03)) & _MASK
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
        return word ^ word >> 31
