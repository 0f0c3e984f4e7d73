"""Keys of the presets of families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_keys(
    layers: int,
    hidden: int,
    heads: int,
    key_value_heads: int,
    mlp: int,
    vocabulary: int,
    norm_epsilon: float,
    **further: Any,
) -> dict[str, Any]:
    """Return the keys of [model] of a preset, with those of `further`."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "key_value_heads": key_value_heads}
    return {**sizes, "mlp": mlp, "vocabulary": vocabulary, "norm_epsilon": norm_epsilon, **further}


def expert_keys(
    count: int, per_token: int, mlp: int, router_normalize: bool, **further: Any
) -> dict[str, Any]:
    """Return the keys of [model.experts] of a preset, with those of `further`."""
    sizes = {"count": count, "per_token": per_token, "mlp": mlp}
    return {**sizes, "router_normalize": router_normalize, **further}


def preset_series(
    source: str,
    sequence: int,
    models: Mapping[str, Mapping[str, Any]],
    common: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return presets of dense models that were published together.

    Args:
        source: Publication of the models.
        sequence: Value of `batch.sequence`.
        models: Keys of [model] in which a model differs from the others, by the name of its preset.
        common: Keys of [model] that all of them have.
        rope_scaling: Keys of [model.rope_scaling]; None if positions are not scaled.
    """
    return {
        name: {
            "source": source,
            "sequence": sequence,
            "model": {**(common or {}), **keys},
            "rope_scaling": rope_scaling or {},
        }
        for name, keys in models.items()
    }
