"""Tensors in nested sequences, mappings and dataclasses, and placeholders for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.errors import HpctrainError


@dataclass(frozen=True)
class TensorPlaceholder:
    """Placeholder for a tensor in the result of a call, whose structure is stored without values.

    Attributes:
        number: Index of the tensor among the new tensors of the result, or among those of the arguments.
        is_argument: True if the call returns an argument unchanged.
    """

    number: int
    is_argument: bool


def tensor_leaves(value: object) -> Iterator[Any]:
    """Yield all tensors and TensorPlaceholders in nested sequences, mappings and dataclasses."""
    if isinstance(value, Tensor | TensorPlaceholder):
        yield value
    else:
        for each in _children(value):
            yield from tensor_leaves(each)


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield all tensors in nested sequences, mappings and dataclasses."""
    return (leaf for leaf in tensor_leaves(value) if isinstance(leaf, Tensor))


def storage_key(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which is equal for all views of the same memory."""
    address: int = tensor.untyped_storage()._cdata
    return address


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same structure with a function applied to each of its `tensor_leaves`."""
    if isinstance(value, Tensor | TensorPlaceholder):
        return change(value)
    if isinstance(value, Mapping):
        if type(value) is dict:
            return {key: map_leaves(each, change) for key, each in value.items()}
        copied: Any = copy(value)
        for key in list(value):
            copied[key] = map_leaves(value[key], change)
        return copied
    if _is_sequence(value):
        inner = [map_leaves(each, change) for each in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    if is_dataclass(value) and not isinstance(value, type):
        copied = copy(value)
        for field in fields(value):
            object.__setattr__(copied, field.name, map_leaves(getattr(value, field.name), change))
        return copied
    return value


def require_known_structure(name: str, value: object) -> None:
    """Raise HpctrainError if the result of a module has tensors in an object that is not searched."""
    inner = list(_children(value))
    for each in inner:
        require_known_structure(name, each)
    is_searched = inner or isinstance(value, Tensor | type) or not hasattr(value, "__dict__")
    if not is_searched and any(isinstance(each, Tensor) for each in vars(value).values()):
        raise HpctrainError(
            f"{name}: returns a {type(value).__name__} that contains tensors, which cannot be sent to "
            "another stage (use tensors, tuples, lists, dicts or dataclasses)"
        )


def _children(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif _is_sequence(value):
        assert isinstance(value, Sequence)
        yield from value
    elif is_dataclass(value) and not isinstance(value, TensorPlaceholder | type):
        yield from (getattr(value, field.name) for field in fields(value))


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | range | torch.Size)
