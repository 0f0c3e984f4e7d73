"""GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hpctrain.deck.family import Family, FamilyDefaults

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": Family(
            defaults=FamilyDefaults(
                positions="learned",
                norm="layer",
                norm_bias=True,
                attention_bias="all",
                mlp_bias=True,
                activation="gelu-tanh",
                tied=True,
            )
        ),
    }
)
"""Families of this module by the value of model.family."""
