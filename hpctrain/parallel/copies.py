"""Copies of matrices in fp32 that stay while a step computes with them: what they take, and who has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from hpctrain.parallel.linear import SplitLinear
from hpctrain.parallel.product import Product
from hpctrain.parallel.vocabulary import VocabularyHead


def products(layers: Iterable[nn.Module]) -> Iterator[Product]:
    """The Products of some layers."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, SplitLinear | VocabularyHead):
                yield module.product


def copied_bytes(layers: Iterable[nn.Module]) -> int:
    """Bytes of the copies that are there by now."""
    return sum(product.copied_bytes for product in products(layers))


def planned_copies(layers: Iterable[nn.Module]) -> int:
    """Bytes of those that a step makes."""
    return sum(product.copy_bytes for product in products(layers))
