"""Keys of the presets of families."""

from __future__ import annotations

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
