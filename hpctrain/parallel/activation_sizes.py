"""What layers say of the memory that autograd saves of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class SavedStorage:
    """Memory that autograd saves: bytes, bytes of an element, and whether these are features of tokens, which
    may be compressed.
    """

    bytes: int
    itemsize: int
    features: bool = True


def as_features(rows: Tensor) -> Tensor:
    """Rows [m, features], as autograd is to save them: [1, 1, m, features], which tells them from what a
    router saves of tokens.
    """
    return rows[None, None]


class DeferredBytes(NamedTuple):
    """Bytes of a layer whose weight gradients are computed later than the rest of its backward pass: what
    these hold, and what is there besides at the most while the rest is computed.
    """

    held: int
    passing: int


@dataclass(frozen=True)
class ActivationSizes:
    """A micro-batch as the layers of one rank see it.

    `tokens` of the rank's piece of the sequences, `rows` of them where the layers are split by sequence;
    `itemsize` of weights and activations as stored, which is how layers save what their Products do not
    keep otherwise, `gradient_itemsize` of weights' gradients; `gpu` tells which of
    torch's kernels save; `selective` says that the core of attention is computed again, `again` that whole
    blocks are. `objective` makes a loss of what a module that users bring gives.
    """

    tokens: int
    rows: int
    micro_size: int
    itemsize: int
    gradient_itemsize: int
    gpu: bool = False
    selective: bool = False
    again: bool = False
    objective: Any = None

    def features(self, count: int, itemsize: int | None = None) -> SavedStorage:
        """So many features of every token."""
        size = itemsize or self.itemsize
        return SavedStorage(self.tokens * count * size, size)

    def row_features(self, count: int, itemsize: int | None = None) -> SavedStorage:
        """So many features of every row."""
        size = itemsize or self.itemsize
        return SavedStorage(self.rows * count * size, size)


def total(storages: Iterable[SavedStorage]) -> int:
    """Their bytes."""
    return sum(storage.bytes for storage in storages)
