"""Published model shapes, from the tables of families. Tests check their parameter counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.deck.families import FAMILIES

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(chain.from_iterable(family.presets for family in FAMILIES.values()))]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Published model: the keys that `model.preset` fills.

    Attributes:
        source: Publication that describes the model.
        sequence: Value of `batch.sequence`.
        model: Keys of [model] with their values, except for those of its tables.
        experts: Keys of [model.experts] with their values; empty for a dense model.
        rope_scaling: Keys of [model.rope_scaling] with their values; empty if positions are not scaled.
        latent: Keys of [model.latent] with their values; empty for attention without latents.
    """

    source: str
    sequence: int
    model: Mapping[str, Any]
    experts: Mapping[str, Any] = field(default_factory=dict)
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    latent: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """Tables of [model] that the preset fills: their keys and values by the name of the table."""
        tables = {"experts": self.experts, "rope_scaling": self.rope_scaling, "latent": self.latent}
        return {name: keys for name, keys in tables.items() if keys}


@cache
def presets() -> Mapping[str, Preset]:
    """Return all presets by name. Do not change the mapping."""
    found = {}
    for family, description in FAMILIES.items():
        for name, keys in description.presets.items():
            found[name] = Preset(**{**keys, "model": {"family": family, **keys["model"]}})
    return found


def preset_named(name: object) -> Preset | None:
    """Return the preset that a value of `model.preset` names; None if it names none."""
    return presets().get(name) if isinstance(name, str) else None
