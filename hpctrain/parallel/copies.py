"""Copies of matrices in fp32 that stay while a step computes with them: what they take, and who has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.tensor import SplitLinear
from hpctrain.parallel.vocabulary import VocabularyHead


class Multiplies(Protocol):
    """A layer that has Products."""

    @property
    def multipliers(self) -> Sequence[SplitLinear | VocabularyHead]:
        """What of it has one each."""


def matmuls_of(layers: Iterable[Multiplies]) -> Iterator[Matmul]:
    """The Products of some layers."""
    for layer in layers:
        for each in layer.multipliers:
            yield each.product


def converted_bytes(layers: Iterable[Multiplies]) -> int:
    """Bytes of the copies that are there by now."""
    return sum(product.converted_bytes for product in matmuls_of(layers))


def planned_converted_bytes(layers: Iterable[Multiplies]) -> int:
    """Bytes of those that a step makes."""
    return sum(product.planned_converted_bytes for product in matmuls_of(layers))
