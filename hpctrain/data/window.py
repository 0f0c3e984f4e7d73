"""A contiguous range of samples, read as if it were all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpctrain.data.batches import MicroBatch, Samples, Wanted


@dataclass
class Window:
    """Samples `first` to `first + count` of `samples`, numbered from 0."""

    samples: Samples
    first: int
    count: int

    def micro_batches(self, wanted: Iterable[Wanted], later: Iterable[Wanted]) -> Iterator[MicroBatch]:
        """Yield the micro-batches `wanted`, whose indices count from the first sample of the window."""
        yield from self.samples.micro_batches(map(self._shifted, wanted), map(self._shifted, later))

    def _shifted(self, each: Wanted) -> Wanted:
        index, epoch = each.last
        return each._replace(indices=each.indices + self.first, last=(index + self.first, epoch))
