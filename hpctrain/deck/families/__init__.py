"""Families of transformers. To add a family, add an entry to `FAMILIES` of a module of this package.

All families are one transformer, described by the keys that `FamilyDefaults` lists. A family is a named
combination of these keys, with the model types of `transformers` that compute the same and its published
models. Each module has a group of families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.deck.families import (
    cohere,
    deepseek,
    gemma,
    glm,
    gpt2,
    gpt_oss,
    granite,
    layer_norms,
    llama,
    llama_variants,
    olmo,
)
from hpctrain.deck.family import Family, FamilyDefaults

_GROUPS = (gpt2, llama, gemma, olmo, granite, gpt_oss, layer_norms, cohere, glm, llama_variants, deepseek)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: family for group in _GROUPS for name, family in group.FAMILIES.items()}
)
"""Families by the value of model.family."""

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]

CHOICES = tuple(
    field.name for field in fields(FamilyDefaults) if field.name not in {"scaled_embedding", "tied"}
)
"""Keys of [model] whose default a family decides, besides `tied` and `embedding_multiplier`."""


def family_values(family: str, hidden: int) -> dict[str, Any]:
    """Return the defaults of keys of [model] in a family, by name.

    Args:
        family: Value of model.family.
        hidden: Value of model.hidden.
    """
    defaults = FAMILIES[family].defaults
    values = {name: getattr(defaults, name) for name in (*CHOICES, "tied")}
    return {**values, "embedding_multiplier": sqrt(hidden) if defaults.scaled_embedding else 1.0}


def described_defaults(name: str) -> str:
    """Return the default of a key in words for the reference: the usual value, and families with others."""
    by_value: dict[Any, list[str]] = {}
    for name_of_family, family in FAMILIES.items():
        by_value.setdefault(getattr(family.defaults, name), []).append(name_of_family)
    usual = max(by_value, key=lambda value: len(by_value[value]))
    others = [
        f"{_default_text(value)} ({', '.join(names)})" for value, names in by_value.items() if value != usual
    ]
    return "; ".join((_default_text(usual), *others))


def described_embedding_multiplier() -> str:
    """Return the default of model.embedding_multiplier in words for the reference."""
    scaled = (name for name, family in FAMILIES.items() if family.defaults.scaled_embedding)
    return f"1.0; the root of hidden ({', '.join(scaled)})"


def _default_text(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
