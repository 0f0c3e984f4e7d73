"""Check that the weights of a checkpoint or a model are finite numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from hpctrain.checkpoint.agree import raise_on_all_ranks
from hpctrain.checkpoint.tensor_ranges import Index, TensorRange, boxes_of
from hpctrain.comm.group import Group
from hpctrain.errors import InputOutputError
from hpctrain.sharding.state import MASTER, MODEL

_CHUNK_ELEMENTS = 4 << 20
"""Largest number of elements that are checked at a time."""


@dataclass(frozen=True)
class NonFiniteWeight:
    """First element of a tensor that is NaN or infinite.

    Attributes:
        tensor: Name of the tensor.
        index: Index of the element in the global tensor.
        value: The element, which is NaN or infinite.
    """

    tensor: str
    index: Index
    value: float

    def __str__(self) -> str:
        return f"{self.tensor} is {self.value:g} at [{', '.join(map(str, self.index))}]"


def nonfinite_element(values: Tensor) -> tuple[Index, float] | None:
    """Return the index and the value of the first non-finite element in row-major order; None if all are."""
    finite = values.isfinite()
    if bool(finite.all()):
        return None
    index = tuple(map(int, (~finite).nonzero()[0]))
    return index, float(values[index])


def nonfinite_weight(group: Group, entries: Iterable[TensorRange]) -> NonFiniteWeight | None:
    """Return the first non-finite weight among the entries of all ranks; None if all are finite. Collective.

    If several tensors have one, the tensor whose name sorts first is returned, so that the result does not
    depend on the layout.
    """
    local = [
        weight for entry in entries if _is_weight(entry) and (weight := _first_nonfinite(entry)) is not None
    ]
    rows_of_ranks = group.all_gather_object([astuple(weight) for weight in local])
    rows = [row for rows_of_rank in rows_of_ranks for row in rows_of_rank]
    return NonFiniteWeight(*min(rows, key=lambda row: row[:2])) if rows else None


def require_finite(group: Group, where: object, entries: Iterable[TensorRange], remedy: str) -> None:
    """Raise an error on all ranks if a weight among the entries is not finite. Collective.

    Args:
        group: All ranks that hold entries.
        where: File or folder that the entries were read from, for the message.
        entries: The entries of this rank.
        remedy: What the user can do, as an imperative clause for the message.

    Raises:
        InputOutputError: A weight is not finite. The message names the first one.
    """
    weight = nonfinite_weight(group, entries)
    with raise_on_all_ranks(group):
        if weight is not None:
            raise InputOutputError(nonfinite_sentence(where, weight, remedy))


def nonfinite_sentence(where: object, weight: object, remedy: str) -> str:
    """Return the error message about a non-finite weight."""
    return f"{where}: {weight}: weights must be finite numbers ({remedy})"


def _is_weight(entry: TensorRange) -> bool:
    return entry.dataset.split("/")[1].removeprefix("replicas.") in {MODEL, MASTER}


def _first_nonfinite(entry: TensorRange) -> NonFiniteWeight | None:
    """Return the non-finite element of an entry that comes first in the global tensor."""
    dtype: torch.dtype = entry.values.dtype
    weights: list[NonFiniteWeight] = []
    for box in boxes_of(entry):
        for piece in box.cut(_CHUNK_ELEMENTS):
            element = nonfinite_element(piece.load(entry.values).view(dtype))
            if element is not None:
                index = tuple(start + local for start, local in zip(piece.start, element[0], strict=True))
                weights.append(NonFiniteWeight(entry.dataset, index, element[1]))
    return min(weights, key=lambda weight: weight.index, default=None)
