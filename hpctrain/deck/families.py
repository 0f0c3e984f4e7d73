"""Families of transformers. To add a family, add an entry to `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

AttentionBias = Literal["none", "query_key_value", "all"]
"""Layers of attention that have biases: none, those of queries, keys and values, or the output layer too."""


@dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """Properties of all models of a family, and defaults of keys of [model].

    Attributes:
        attention_bias: Default of model.attention_bias.
    """

    attention_bias: AttentionBias


FAMILIES: Mapping[str, FamilyTraits] = MappingProxyType(
    {
        "gpt2": FamilyTraits(attention_bias="all"),
        "llama": FamilyTraits(attention_bias="none"),
    }
)
"""Properties of each family, by the value of model.family."""
