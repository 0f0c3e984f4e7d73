"""The check that weights which were read, or trained, are finite numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from hpctrain.checkpoint.agree import together
from hpctrain.checkpoint.layout import Entry, Index, rectangles_of
from hpctrain.comm.group import Group
from hpctrain.errors import InputOutputError
from hpctrain.sharding.state import MASTER, MODEL

_PIECE = 4 << 20
"""Elements that are examined at a time, at most."""


@dataclass(frozen=True)
class NonFiniteWeight:
    """The first element of a tensor that is not a finite number: where it lies, and what it is."""

    tensor: str
    index: Index
    value: float

    def __str__(self) -> str:
        return f"{self.tensor} is {self.value:g} at [{', '.join(map(str, self.index))}]"


def nonfinite_element(values: Tensor) -> tuple[Index, float] | None:
    """Return index and value of the first element, in row-major order, that is not finite."""
    finite = values.isfinite()
    if bool(finite.all()):
        return None
    index = tuple(map(int, (~finite).nonzero()[0]))
    return index, float(values[index])


def nonfinite_weight(group: Group, entries: Iterable[Entry]) -> NonFiniteWeight | None:
    """Return the first element of the weights among all ranks' entries that is not finite; collective.

    Of several tensors it is the one whose name sorts first, whatever the layout.
    """
    found = [each for entry in entries if _is_weight(entry) and (each := _first(entry)) is not None]
    rows = [row for of_rank in group.all_gather_object([astuple(each) for each in found]) for row in of_rank]
    return NonFiniteWeight(*min(rows, key=lambda row: row[:2])) if rows else None


def require_finite(group: Group, where: object, entries: Iterable[Entry], remedy: str) -> None:
    """Raise an InputOutputError on all ranks if a weight among the entries is not finite; collective.

    `where` is what the entries were read from, `remedy` a clause on what the user can do.
    """
    weight = nonfinite_weight(group, entries)
    with together(group):
        if weight is not None:
            raise InputOutputError(nonfinite_sentence(where, weight, remedy))


def nonfinite_sentence(where: object, weight: object, remedy: str) -> str:
    """Return the sentence that tells of a weight that is not finite."""
    return f"{where}: {weight}: weights must be finite numbers ({remedy})"


def _is_weight(entry: Entry) -> bool:
    return entry.dataset.split("/")[1].removeprefix("replicas.") in {MODEL, MASTER}


def _first(entry: Entry) -> NonFiniteWeight | None:
    """Return the first element of an entry, in the order of the global tensor, that is not finite."""
    kind: torch.dtype = entry.values.dtype
    found: list[NonFiniteWeight] = []
    for rectangle in rectangles_of(entry):
        for piece in rectangle.cut(_PIECE):
            bad = nonfinite_element(piece.load(entry.values).view(kind))
            if bad is not None:
                index = tuple(start + own for start, own in zip(piece.start, bad[0], strict=True))
                found.append(NonFiniteWeight(entry.dataset, index, bad[1]))
    return min(found, key=lambda each: each.index, default=None)
