"""The samples of a user's dataset as micro-batches, loaded here or ahead, by other processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpctrain.data.batches import SPLITS, MicroBatch, Wanted
from hpctrain.data.dataset import UsersDataset
from hpctrain.data.fit import split_samples
from hpctrain.data.items import Fields
from hpctrain.data.workers import Ticket, Workers
from hpctrain.errors import HpctrainError

_MOST_AHEAD = 64
"""Micro-batches of a rank that are under way, of this step and the next: each may be an open file."""

_Key = tuple[tuple[int, ...], tuple[int, ...]]


class DatasetSource:
    """The samples of one split of a dataset: "train" the leading ones, "validation" the trailing `fraction`.

    Sizes as of a token file's. With `workers`, those of this step and the next are loaded ahead.
    """

    def __init__(
        self, dataset: UsersDataset, fraction: float, split: str, workers: Workers | None = None
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
        self._under_way: dict[_Key, Ticket] = {}

    def micro_batches(self, wanted: Iterable[Wanted], later: Iterable[Wanted]) -> Iterator[MicroBatch]:
        """See Samples: with fewer rows where there are fewer samples; where there are none, with the last,
        which does not count there.
        """
        if self.workers is None:
            for each in wanted:
                yield self._micro_batch(each, self.dataset.batch(*self._key(each)))
            return
        now, next_ones = list(wanted), list(later)
        keys = [self._key(each) for each in (*now, *next_ones)]
        for key in self._under_way.keys() - set(keys):
            self._under_way.pop(key).dropped = True
        coming = iter(keys)
        for each in now:
            for key in coming:
                self._ask(self.workers, key)
                if len(self._under_way) >= _MOST_AHEAD:
                    break
            key = self._key(each)
            self._ask(self.workers, key)
            yield self._micro_batch(each, self.workers.take(self._under_way.pop(key)))

    def _ask(self, workers: Workers, key: _Key) -> None:
        if key not in self._under_way:
            self._under_way[key] = workers.ask(*key)

    def _key(self, wanted: Wanted) -> _Key:
        """Numbers in the dataset, and epochs, of what is read for a micro-batch."""
        index, epoch = wanted.last
        indices = wanted.indices.tolist() or [index]
        return tuple(self._first + each for each in indices), tuple(wanted.epochs.tolist() or [epoch])

    @staticmethod
    def _micro_batch(wanted: Wanted, fields: Fields) -> MicroBatch:
        return MicroBatch(fields, len(wanted.indices))
