"""View of a contiguous range of samples as a source of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpctrain.data.batches import MicroBatch, MicroBatchRequest, SampleSource


@dataclass
class SampleWindow:
    """Source of the samples `first` to `first + count - 1` of `samples`, which are numbered from 0 again."""

    samples: SampleSource
    first: int
    count: int

    def micro_batches(
        self, requests: Iterable[MicroBatchRequest], upcoming: Iterable[MicroBatchRequest]
    ) -> Iterator[MicroBatch]:
        """Yield the requested micro-batches. Their indices count from the first sample of the window."""
        yield from self.samples.micro_batches(map(self._shifted, requests), map(self._shifted, upcoming))

    def _shifted(self, request: MicroBatchRequest) -> MicroBatchRequest:
        index, epoch = request.last
        return request._replace(indices=request.indices + self.first, last=(index + self.first, epoch))
