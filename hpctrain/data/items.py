"""Batches of the items of a user's dataset: tensors by name, each with a row for every item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.errors import UserCodeError
from hpctrain.text import article

Fields = dict[str, Tensor]


@dataclass(frozen=True)
class FieldSpec:
    """Type and shape of one field of an item, or of one row of a batch."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(value: Tensor) -> FieldSpec:
        """Return the type and shape of the value of one row."""
        return FieldSpec(value.dtype, tuple(value.shape))

    def __str__(self) -> str:
        """Return a text such as `float32 [3, 32, 32]`."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


FieldSpecs = Mapping[str, FieldSpec]
"""Type and shape of every field, by name."""


def item_tensors(item: Any, where: str) -> Fields:
    """Return the fields of an item as tensors.

    Raises:
        UserCodeError: The item is not a dict of arrays. The message begins with `where`.
    """
    if not isinstance(item, Mapping):
        kind = article(type(item).__name__)
        raise UserCodeError(f"{where} is {kind}, not a dict of arrays (data.collate can batch other items)")
    if not item or not all(isinstance(name, str) for name in item):
        raise UserCodeError(f"{where} has the keys {list(item)[:5]}, expected one or more strings")
    return {name: as_tensor(value, f"{where} has {name}") for name, value in item.items()}


def as_tensor(value: Any, where: str) -> Tensor:
    """Return an array as a tensor in host memory, of the same type. Floats of Python become fp32.

    Raises:
        UserCodeError: The value is not an array of numbers. The message begins with `where`.
    """
    if isinstance(value, int | float | list | tuple) and not isinstance(value, np.generic):
        try:
            value = np.asarray(value)
        except ValueError:  # rows of several lengths
            value = None
        value = value.astype(np.float32) if value is not None and value.dtype == np.float64 else value
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        if not array.flags.writeable or not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    raise UserCodeError(f"{where} of type {type(value).__name__}, expected an array of numbers")


def stack(items: Sequence[Any], indices: Sequence[int], first: FieldSpecs, title: str) -> Fields:
    """Return a batch of items.

    Args:
        items: The items.
        indices: Their numbers in the dataset.
        first: Fields of the dataset's first item, which all items must have.
        title: Name of the dataset, for messages.

    Raises:
        UserCodeError: An item has other fields, or a field of another type or shape.
    """
    rows = []
    for item, index in zip(items, indices, strict=True):
        row = item_tensors(item, f"{title}: item {index}")
        if row.keys() != first.keys():
            raise UserCodeError(
                f"{title}: item {index} has the keys {', '.join(sorted(row))}, but item 0 has "
                f"{', '.join(sorted(first))}"
            )
        for name, expected in first.items():
            if (actual := FieldSpec.of(row[name])) != expected:
                raise UserCodeError(
                    f"{title}: item {index} has {name} of {actual}, expected {expected} as in item 0 (set "
                    "data.collate to a function that batches unequal items)"
                )
        rows.append(row)
    return {name: torch.stack([row[name] for row in rows]) for name in first}


def batch_tensors(batch: Any, rows: int, collate: str) -> Fields:
    """Return the result of a user's collate function as tensors.

    Args:
        batch: The result.
        rows: Number of items that the function received.
        collate: Name of the function, for messages.

    Raises:
        UserCodeError: The result is not a dict of arrays with a row for every item.
    """
    fields = item_tensors(batch, f"data.collate: the result of {collate}")
    for name, field in fields.items():
        if field.dim() == 0 or len(field) != rows:
            raise UserCodeError(
                f"data.collate: {collate} returns {name} of shape {list(field.shape)} for {rows} items, "
                "expected one row for each"
            )
    return {name: field.contiguous() for name, field in fields.items()}
