"""Keys of a config.json that both its reader and its writer use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hpctrain.deck.family import ConfigKey

Config = Mapping[str, Any]
"""Content of a config.json."""

NO_CONFIG: Config = MappingProxyType({})
"""Config of a model that was not imported."""

SLIDING, FULL = LAYER_TYPES = ("sliding_attention", "full_attention")
"""Values in `layer_types` of a layer with a window, and of one without."""

EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts")
"""Keys of the number of experts with the same meaning. Each version of `transformers` writes one of them."""


def written_key(key: str, config: Config) -> str:
    """Return the name by which a config.json has a key, which differs from others for numbers of experts."""
    names = EXPERT_COUNT_KEYS if key in EXPERT_COUNT_KEYS else ()
    return next((name for name in (key, *names) if config.get(name) is not None), key)


def size_text(key: str, value: object, config: Config) -> str:
    """Return a key with its value in words, which say if it is a default that the config.json lacks."""
    key = written_key(key, config)
    if key in config and config[key] == value:
        return f"{key} = {value}"
    return f"{key} is {'null' if key in config else 'missing'} and {value} by default"


def deck_value(key: ConfigKey, value: float) -> float:
    """Return the value of a key of [model] for the number of its key in config.json."""
    match key.form:
        case "reciprocal":
            return 1 / value
        case "inverse_root":
            return float(value**-0.5)
        case _:
            return value


def integer_inverse_square(value: float) -> int | None:
    """Return the integer whose inverse root is a value, up to rounding; None if there is none."""
    exact = value**-2
    return round(exact) if abs(exact - round(exact)) < 1e-6 * exact else None
