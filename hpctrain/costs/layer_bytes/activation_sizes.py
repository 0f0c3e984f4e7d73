"""Sizes of a micro-batch on one rank, and kinds of memory that layers need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class SavedStorage:
    """Memory that autograd saves.

    Attributes:
        bytes: Number of bytes.
        itemsize: Bytes of an element.
        features: True if the elements are features of tokens, which may be compressed.
    """

    bytes: int
    itemsize: int
    features: bool = True


class DeferredBytes(NamedTuple):
    """Memory of a layer whose weight gradients are deferred.

    Attributes:
        deferred: Bytes that the deferred computations keep.
        transient: Largest number of further bytes during the rest of the backward pass.
    """

    deferred: int
    transient: int


@dataclass(frozen=True)
class ActivationSizes:
    """Micro-batch as the layers of one rank see it.

    Attributes:
        tokens: Tokens of this rank's piece of the sequences.
        rows: Tokens of them between the linear layers, which sequence parallelism splits.
        micro_size: Sequences of a micro-batch.
        itemsize: Bytes of an element of weights and activations.
        gradient_itemsize: Bytes of an element of weight gradients.
        gpu: True on a GPU, whose kernels save other tensors.
        recomputes_core: True if the core of attention is recomputed.
        recomputes_blocks: True if complete blocks are recomputed.
        objective: Makes a loss of the result of a user's module.
    """

    tokens: int
    rows: int
    micro_size: int
    itemsize: int
    gradient_itemsize: int
    gpu: bool = False
    recomputes_core: bool = False
    recomputes_blocks: bool = False
    objective: Any = None

    def features(self, count: int, itemsize: int | None = None) -> SavedStorage:
        """Return the memory of `count` features of every token."""
        size = itemsize or self.itemsize
        return SavedStorage(self.tokens * count * size, size)

    def row_features(self, count: int, itemsize: int | None = None) -> SavedStorage:
        """Return the memory of `count` features of every row."""
        size = itemsize or self.itemsize
        return SavedStorage(self.rows * count * size, size)


def total(storages: Iterable[SavedStorage]) -> int:
    """Return the bytes of all storages together."""
    return sum(storage.bytes for storage in storages)
