"""Assembled tensors have the elements that torch's operations give, and read no more than their boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.exchange.assembled_tensor import AssembledTensor

SOURCES = {"a": torch.arange(96).view(4, 12, 2), "b": 100 + torch.arange(96).view(4, 12, 2)}


def read(source: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    return SOURCES[source][tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def halves_of_pairs(x: Any) -> Any:
    """Move the even elements of dim 1 before the odd ones."""
    return x.reshape([4, x.shape[1] // 2, 2, 2]).transpose(1, 2).reshape(x.shape)


def pairs_of_halves(x: Any) -> Any:
    """Undo `halves_of_pairs`."""
    return x.reshape([4, 2, x.shape[1] // 2, 2]).transpose(1, 2).reshape(x.shape)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "cat": lambda a, b: torch.cat([a, b], 1),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "transpose": lambda a, _: torch.transpose(a, 0, 2),
    "chunk": lambda a, _: torch.chunk(a, 5, dim=1)[1],
    "split": lambda a, _: torch.split(a, [5, 7], dim=1)[1],
    "squeeze": lambda a, _: torch.chunk(a, 4, dim=0)[2].squeeze(0),
    "reshape": lambda a, _: a.reshape(2, 2, 4, 3, -1),
    "merge": lambda a, b: torch.cat([a, b], 1).view(-1),
    "other factors": lambda a, _: a.view(3, 32),
    "ones": lambda a, _: a.reshape([1, 4, 12, 1, 2, 1]).reshape(48, 2),
    "divided inside of a box": lambda a, b: torch.cat([a, b], 1).view(4, 4, 6, 2),
    "divided across boxes": lambda a, b: torch.cat([a, b], 1).view(4, 3, 8, 2),
    "halves": lambda a, _: halves_of_pairs(a),
    "pairs": lambda a, _: pairs_of_halves(a),
    "there and back": lambda a, _: pairs_of_halves(halves_of_pairs(a)),
    "part of halves": lambda a, b: torch.chunk(halves_of_pairs(torch.cat([a, b], 1)), 3, dim=1)[1],
    "part of pairs": lambda a, b: torch.split(pairs_of_halves(torch.cat([a, b], 1)), [5, 19], dim=1)[1],
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_has_the_elements_of_the_same_operations_on_tensors(name: str) -> None:
    expected = CHANGES[name](SOURCES["a"], SOURCES["b"])
    made = CHANGES[name](*(AssembledTensor.of(name, tuple(each.shape)) for name, each in SOURCES.items()))
    assert made.shape == tuple(expected.shape) and made.ndim == made.dim() == expected.dim()
    assert torch.equal(made.read((0,) * made.ndim, made.shape, read), expected)
    start = tuple(size // 3 for size in made.shape)
    extent = tuple(max(1, size // 2) for size in made.shape)
    inner = tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))
    assert torch.equal(made.read(start, extent, read), expected[inner])
    assert sum(prod(each.shape) for each in made.boxes) == expected.numel()


def test_the_number_of_boxes_does_not_grow_with_the_length_of_a_dim() -> None:
    long = AssembledTensor.of("a", (4, 1000, 2))
    assert len(halves_of_pairs(long).boxes) == len(pairs_of_halves(long).boxes) == 2
    # Elements of a box of the exported tensor lie side by side in the source: none is read twice.
    assert all(each.shape == each.source_shape for each in pairs_of_halves(long).boxes)
