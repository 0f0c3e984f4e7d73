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
        positions: Learned positions are added to the input; queries and keys are rotated by rotary ones.
        norm: LayerNorm with weight and bias, or RMSNorm with a weight.
        feed_forward_bias: True if linear layers of feed-forward parts have biases.
        attention_bias: Default of model.attention_bias.
        tied: Default of model.tied, except for reward models.
    """

    positions: Literal["learned", "rotary"]
    norm: Literal["layer", "rms"]
    feed_forward_bias: bool
    attention_bias: AttentionBias
    tied: bool


FAMILIES: Mapping[str, FamilyTraits] = MappingProxyType(
    {
        "gpt2": FamilyTraits(
            positions="learned", norm="layer", feed_forward_bias=True, attention_bias="all", tied=True
        ),
        "llama": FamilyTraits(
            positions="rotary", norm="rms", feed_forward_bias=False, attention_bias="none", tied=False
        ),
    }
)
"""Properties of each family, by the value of model.family."""
