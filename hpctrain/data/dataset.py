"""Dataset that a user's function returns: any object with a length and with items by number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from hpctrain.data.items import Fields, FieldSpec, FieldSpecs, batch_tensors, item_tensors, stack
from hpctrain.data.seeded import restored_generators, seed_by
from hpctrain.deck.code import NamedCode
from hpctrain.deck.user_code import call_function, import_function, run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.text import article

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck  # a late import, so that processes that load items start faster

_EXAMPLES = 4
"""Number of items in the checksum that identifies a dataset, evenly spaced."""


@dataclass(frozen=True)
class DatasetSpec:
    """Description of a user's dataset in a deck.

    It contains the function that makes the dataset, its arguments (JSON), and the function that makes
    batches. Random numbers that items draw follow from `seed` and from the sample and epoch that they are
    drawn for.
    """

    code: NamedCode
    arguments: str
    collate: NamedCode | None
    seed: int

    @staticmethod
    def of(deck: Deck) -> DatasetSpec:
        """Return the description of the dataset that a deck names."""
        keys = deck.data
        assert keys.dataset is not None
        arguments = json.dumps(keys.arguments or {}, default=str)
        collate = None if keys.collate is None else deck.code(keys.collate)
        return DatasetSpec(deck.code(keys.dataset), arguments, collate, deck.run.seed)

    @staticmethod
    def of_json(text: bytes) -> DatasetSpec:
        """Return the description that another process sent with `to_json`."""
        fields = json.loads(text)
        collate = None if fields["collate"] is None else NamedCode(**fields["collate"])
        return DatasetSpec(NamedCode(**fields["code"]), fields["arguments"], collate, fields["seed"])

    def to_json(self) -> str:
        """Return the description as one line of JSON, for a process that loads items."""
        return json.dumps(asdict(self))

    @property
    def title(self) -> str:
        """The dataset's name without the folder of its file."""
        return self.code.title


class UserDataset:
    """Dataset of a user's function, and batches of its items. Errors of either are HpctrainErrors."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec, self.title = spec, spec.title
        arguments = json.loads(spec.arguments)
        with restored_generators():
            seed_by(spec.seed)
            dataset = call_function(import_function(spec.code), arguments, self.title, "data.arguments")
        for method, what in (("__len__", "len()"), ("__getitem__", "indexing")):
            if not hasattr(type(dataset), method):
                kind = article(type(dataset).__name__)
                raise HpctrainError(f"{self.title} returns {kind}, which does not support {what} ({method})")
        self._items = dataset
        with run_user_code(f"{self.title}: len() fails"):
            self.count = len(dataset)
        if self.count < 1:
            raise HpctrainError(f"{self.title} returns an empty dataset")
        self._collate = None if spec.collate is None else import_function(spec.collate)

    @cached_property
    def first_item_specs(self) -> FieldSpecs:
        """Types and shapes of the fields of the first item, which all items have if they are stacked."""
        with restored_generators():
            item = item_tensors(self._item(0, 0), f"{self.title}: item 0")
        return {name: FieldSpec.of(value) for name, value in item.items()}

    @cached_property
    def field_specs(self) -> FieldSpecs:
        """Types and shapes of the fields of one row of a batch, from a batch of the first item."""
        if self._collate is None:
            return self.first_item_specs
        batch = self.batch([0], [0])
        return {name: FieldSpec.of(field[0]) for name, field in batch.items()}

    def batch(self, indices: Sequence[int], epochs: Sequence[int]) -> Fields:
        """Return a batch of items. It depends only on the arguments, not on the process that loads it.

        Args:
            indices: Numbers of the items.
            epochs: Epoch of each item, which its random numbers depend on.
        """
        with restored_generators():
            items = [self._item(index, epoch) for index, epoch in zip(indices, epochs, strict=True)]
            if self._collate is None:
                return stack(items, indices, self.first_item_specs, self.title)
            seed_by(self.spec.seed, 1, epochs[0], indices[0])
            assert self.spec.collate is not None
            short = self.spec.collate.title
            with run_user_code(f"data.collate: {short} fails with items {_listed(indices)}"):
                batch = self._collate(items)
            return batch_tensors(batch, len(items), short)

    def description(self) -> dict[str, Any]:
        """Return the description that checkpoints store.

        It contains the length, a checksum of some items, and what made the dataset. Random numbers from the
        seed of the run do not change the checksum.
        """
        some = sorted({number * (self.count - 1) // (_EXAMPLES - 1) for number in range(_EXAMPLES)})
        total = 0
        with restored_generators():
            for index in some:
                seed_by(0, index)
                with run_user_code(f"{self.title}: item {index} fails"):
                    item = self._items[index]
                total = _checksum(item, total)
        return {
            "dataset": self.spec.code.target,
            "arguments": json.loads(self.spec.arguments),
            "samples": self.count,
            "fingerprint": total,
        }

    def _item(self, index: int, epoch: int) -> Any:
        seed_by(self.spec.seed, 0, epoch, index)
        with run_user_code(f"{self.title}: item {index} fails"):
            return self._items[index]


@lru_cache(maxsize=2)
def open_dataset(spec: DatasetSpec) -> UserDataset:
    """Return a dataset, which is opened once per process, with the errors of UserDataset."""
    return UserDataset(spec)


def dataset_of(deck: Deck) -> UserDataset:
    """Open the dataset that a deck names, and read its first batch.

    Raises:
        HpctrainError: The dataset or its first batch is invalid. The message names the key of the deck.
    """
    try:
        opened = open_dataset(DatasetSpec.of(deck))
        _ = opened.field_specs  # reads the first batch
    except HpctrainError as error:
        first, *frames = error.problems
        raise HpctrainError([deck.problem("data.dataset", first), *frames]) from error
    return opened


def _checksum(item: Any, start: int) -> int:
    """Return the checksum of all arrays in an item, by name."""
    if isinstance(item, dict):
        for key in sorted(item, key=str):
            start = _checksum(item[key], crc32(str(key).encode(), start))
        return start
    if isinstance(item, list | tuple):
        for each in item:
            start = _checksum(each, start)
        return start
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu()
        item = item.float() if item.dtype == torch.bfloat16 else item
        item = item.numpy()
    content = item.tobytes() if hasattr(item, "tobytes") else repr(item).encode()
    return crc32(content, start)


def _listed(indices: Sequence[int]) -> str:
    some = ", ".join(map(str, indices[:8]))
    return some if len(indices) <= 8 else f"{some}, ..."
