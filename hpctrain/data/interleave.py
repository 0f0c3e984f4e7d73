"""From which of several sources each sample of a run comes: shares hold to less than a sample, always.

Of n samples, whatever n, source s has either floor or ceil of w n, where w is its share. Its j-th sample,
from 1, has to be one of those numbered floor((j-1)/w) to ceil(j/w)-1, from 0, and among all that may come the
one comes that has to soonest: as one processor serves periodic tasks, which it can where the shares add up to
one (Baruah et al., "Proportionate progress", Algorithmica 1996). Where two have to come at once, words of the
seed decide, so that ranks that take samples in turns do not have a source each.

What has come before a sample follows from the shares and its number alone, without all that came before: no
sample waits longer than 1/w, so that what was to come by then has come, and from any state that long before
the same choices follow. So each block of samples begins that far back, or where the one before it ends.
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
_KEPT = 16
"""Blocks that are kept: those of a step, and of the next, which is read ahead."""
_MASK = (1 << 64) - 1


class InterleavedSamples(NamedTuple):
    """Of `_BLOCK` samples in a row the source, and which sample of it that is; and how many each source has
    had before them, and with them.
    """

    source: Integers
    nth: Integers
    before: list[int]
    after: list[int]


class Interleaving:
    """The sources, by number, of samples numbered from 0, with these shares (which are above 0 and add up to
    one), as `seed` decides where either may come.
    """

    def __init__(self, shares: Sequence[Fraction], seed: int) -> None:
        assert shares and sum(shares) == 1 and min(shares) > 0, shares
        self.whole = lcm(*(share.denominator for share in shares))
        self.shares = [share.numerator * (self.whole // share.denominator) for share in shares]
        self.seed = seed * GOLDEN & _MASK
        self.back = ceil(1 / min(shares)) + 3
        self._blocks: dict[int, InterleavedSamples] = {}

    def at(self, places: Integers) -> tuple[Integers, Integers]:
        """Of the samples at these places the sources, and how many samples of that source come before."""
        source, nth = np.empty_like(places), np.empty_like(places)
        numbers = places // _BLOCK
        for number in np.unique(numbers).tolist():
            here = numbers == number
            block, inside = self._block(number), places[here] - number * _BLOCK
            source[here], nth[here] = block.source[inside], block.nth[inside]
        return source, nth

    def counts(self, samples: int) -> list[int]:
        """How many of the first so many samples come from each source."""
        number, inside = divmod(samples, _BLOCK)
        block = self._block(number)
        more = np.bincount(block.source[:inside], minlength=len(self.shares))
        return [before + each for before, each in zip(block.before, more.tolist(), strict=True)]

    def _block(self, number: int) -> InterleavedSamples:
        known = self._blocks.pop(number, None)
        if known is None:
            first = number * _BLOCK
            before = self._blocks.get(number - 1)
            counts = list(before.after) if before is not None else self._reached(first)
            start = list(counts)
            source = self._choose(first, _BLOCK, counts)
            nth = np.empty(_BLOCK, np.int64)
            for each, begin in enumerate(start):
                here = source == each
                nth[here] = np.arange(begin, begin + np.count_nonzero(here))
            known = InterleavedSamples(source, nth, start, counts)
        self._blocks[number] = known  # the newest is the last
        while len(self._blocks) > _KEPT:
            del self._blocks[next(iter(self._blocks))]
        return known

    def _reached(self, samples: int) -> list[int]:
        """How many of the first so many samples each source has."""
        first = max(0, samples - self.back)
        exact = [Fraction(share * first, self.whole) for share in self.shares]
        counts = [floor(each) for each in exact]
        begun = [self._urgency(each, count) for each, count in enumerate(counts) if exact[each] != count]
        for _, _, each in sorted(begun)[: first - sum(counts)]:
            counts[each] += 1
        self._choose(first, samples - first, counts)
        return counts

    def _choose(self, first: int, samples: int, counts: list[int]) -> Integers:
        """The sources of so many samples from `first` on, before which each had `counts`, which goes on."""
        source = np.empty(samples, np.int64)
        waiting = [(self._first(each, count), each) for each, count in enumerate(counts)]
        heapify(waiting)
        ready: list[tuple[int, int, int]] = []
        for place in range(samples):
            while waiting and waiting[0][0] <= first + place:
                _, each = heappop(waiting)
                heappush(ready, self._urgency(each, counts[each]))
            _, _, each = heappop(ready)
            source[place] = each
            counts[each] += 1
            heappush(waiting, (self._first(each, counts[each]), each))
        return source

    def _first(self, source: int, count: int) -> int:
        """The number of the first sample that may be the next of a source that has had `count`."""
        return count * self.whole // self.shares[source]

    def _urgency(self, source: int, count: int) -> tuple[int, int, int]:
        """By what of two sources' next samples one comes first: when it has to have come, then a word of the
        seed.
        """
        return -(-(count + 1) * self.whole // self.shares[source]), self._word(source, count), source

    def _word(self, source: int, count: int) -> int:
        """SplitMix64's finalizer of a sample of a source."""
        word = (self.seed ^ (count * GOLDEN + source * 0xD1B54A32D192ED03)) & _MASK
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
        return word ^ word >> 31
