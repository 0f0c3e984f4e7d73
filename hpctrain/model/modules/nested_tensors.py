"""The structure of what a call takes and gives: where its tensors are, and what else is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpctrain.errors import HpctrainError


@dataclass(frozen=True)
class Spec:
    """In the place of a tensor: its form, whether a gradient `learns` of it, and whether it is `changed` in
    place after the call that gave it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    changed: bool = False

    @property
    def elements(self) -> int:
        """Of the tensor."""
        return prod(self.shape)

    @property
    def travels(self) -> bool:
        """Whether it can be among fractions."""
        return self.dtype.is_floating_point

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor has this form."""
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class InputReference:
    """In the place of a tensor that a call gives back as it was: its number among those that it took."""

    number: int


def leaves(value: object) -> Iterator[Any]:
    """All tensors, and what is in their place, in nested sequences, tables and dataclasses."""
    if isinstance(value, Tensor | Spec | InputReference):
        yield value
    else:
        for each in _within(value):
            yield from leaves(each)


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield all tensors in nested sequences, mappings and dataclasses."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure, with something else for each of its `leaves`."""
    if isinstance(value, Tensor | Spec | InputReference):
        return change(value)
    if isinstance(value, Mapping):
        if type(value) is dict:
            return {key: replaced(each, change) for key, each in value.items()}
        made: Any = copy(value)
        for key in list(value):
            made[key] = replaced(value[key], change)
        return made
    if _is_row(value):
        inner = [replaced(each, change) for each in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    if is_dataclass(value) and not isinstance(value, type):
        made = copy(value)
        for field in fields(value):
            object.__setattr__(made, field.name, replaced(getattr(value, field.name), change))
        return made
    return value


def require_seen(name: str, value: object) -> None:
    """HpctrainError where what a call of this name gives has tensors in an object of an unknown structure."""
    inner = list(_within(value))
    for each in inner:
        require_seen(name, each)
    plain = inner or isinstance(value, Tensor | type) or not hasattr(value, "__dict__")
    if not plain and any(isinstance(each, Tensor) for each in vars(value).values()):
        raise HpctrainError(
            f"{name}: returns a {type(value).__name__} that contains tensors, which cannot be sent to "
            "another stage (use tensors, tuples, lists, dicts or dataclasses)"
        )


def _within(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif _is_row(value):
        assert isinstance(value, Sequence)
        yield from value
    elif is_dataclass(value) and not isinstance(value, Spec | InputReference | type):
        yield from (getattr(value, field.name) for field in fields(value))


def _is_row(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | range | torch.Size)
