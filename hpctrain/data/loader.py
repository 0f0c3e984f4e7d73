"""Micro-batches of a user's dataset, which this process or worker processes load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpctrain.data.batches import SPLITS, MicroBatch, MicroBatchRequest
from hpctrain.data.data_checks import split_samples
from hpctrain.data.dataset import UserDataset
from hpctrain.data.items import Fields
from hpctrain.data.worker_pool import Ticket, WorkerPool
from hpctrain.errors import HpctrainError

_MAX_AHEAD = 64
"""Largest number of micro-batches that are loaded ahead. Each of them may need an open file."""

_Key = tuple[tuple[int, ...], tuple[int, ...]]


class DatasetSource:
    """Source of the samples of one split of a user's dataset.

    The split "validation" has the trailing `fraction` of the samples, and "train" the others, as with token
    files. With `workers`, the samples of this step and the next one are loaded ahead.
    """

    def __init__(
        self, dataset: UserDataset, fraction: float, split: str, workers: WorkerPool | None = None
    ) -> None:
        assert split in SPLITS and 0 <= fraction < 1, (split, fraction)
        self.dataset, self.workers = dataset, workers
        trained, held_out = split_samples(dataset.count, fraction)
        if not trained:
            raise HpctrainError(
                f"{dataset.title} has {dataset.count} sample, which data.validation = {fraction:g} holds out"
            )
        self._first = 0 if split == "train" else trained
        self.count = trained if split == "train" else held_out
        self._in_flight: dict[_Key, Ticket] = {}

    def micro_batches(
        self, requests: Iterable[MicroBatchRequest], upcoming: Iterable[MicroBatchRequest]
    ) -> Iterator[MicroBatch]:
        """Yield the requested micro-batches, without padding rows.

        A micro-batch without samples gets one row, which is the last sample of the step and is not counted.
        """
        if self.workers is None:
            for each in requests:
                yield self._micro_batch(each, self.dataset.batch(*self._key(each)))
            return
        now, later = list(requests), list(upcoming)
        keys = [self._key(each) for each in (*now, *later)]
        for key in self._in_flight.keys() - set(keys):
            self._in_flight.pop(key).dropped = True
        coming = iter(keys)
        for each in now:
            for key in coming:
                self._ask(self.workers, key)
                if len(self._in_flight) >= _MAX_AHEAD:
                    break
            key = self._key(each)
            self._ask(self.workers, key)
            yield self._micro_batch(each, self.workers.take(self._in_flight.pop(key)))

    def _ask(self, workers: WorkerPool, key: _Key) -> None:
        if key not in self._in_flight:
            self._in_flight[key] = workers.ask(*key)

    def _key(self, request: MicroBatchRequest) -> _Key:
        """Return the numbers of the samples in the dataset that a micro-batch needs, and their epochs."""
        index, epoch = request.last
        indices = request.indices.tolist() or [index]
        return tuple(self._first + each for each in indices), tuple(request.epochs.tolist() or [epoch])

    @staticmethod
    def _micro_batch(request: MicroBatchRequest, fields: Fields) -> MicroBatch:
        return MicroBatch(fields, len(request.indices))
