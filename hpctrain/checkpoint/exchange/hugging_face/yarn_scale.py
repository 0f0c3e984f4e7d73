"""Scale of the scores of latent attention under "yarn", which files say by `mscale_all_dim`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log, sqrt
from types import MappingProxyType
from typing import Any

from hpctrain.model.shape import ModelShape

_NONE: Mapping[str, Any] = MappingProxyType({})
_DIGITS = range(3, 17)
"""Numbers of digits to which a value is rounded, to find the one that a file would say."""


def yarn_attention_scale(head_size: int, factor: float, mscale_all_dim: float) -> float:
    """Return the factor of the products of queries and keys, as `transformers` computes it."""
    mscale = 0.1 * mscale_all_dim * log(factor) + 1 if factor > 1 else 1.0
    scale: float = head_size**-0.5
    return scale * mscale * mscale


def has_default_scale(shape: ModelShape) -> bool:
    """Return True if the factor of the products of queries and keys is 1 / sqrt(head_size)."""
    return shape.attention_scale in {None, shape.head_size**-0.5, 1 / sqrt(shape.head_size)}


def mscale_of(shape: ModelShape, imported: Mapping[str, Any] = _NONE) -> float | None:
    """Return the `mscale_all_dim` with which a model has its attention scale.

    Args:
        shape: Shape of the model.
        imported: The config.json that the model was imported with, whose value is preferred; empty if it was
            not imported.

    Returns:
        The value, which is never 0, or None if the scale is 1 / sqrt(head_size), or if no value gives it.
    """
    scale, scaling = shape.attention_scale, shape.rope_scaling
    if shape.latent is None or scale is None or has_default_scale(shape):
        return None
    if scaling is None or scaling.kind != "yarn":
        return None
    ratio = scale * sqrt(shape.head_size)
    if scaling.factor <= 1 or ratio <= 1:
        return None
    value = (sqrt(ratio) - 1) / (0.1 * log(scaling.factor))
    candidates = (*_imported_values(imported), *(round(value, digits) for digits in _DIGITS))
    exact = (
        each for each in candidates if yarn_attention_scale(shape.head_size, scaling.factor, each) == scale
    )
    return next(exact, value) or None


def _imported_values(config: Mapping[str, Any]) -> Iterator[float]:
    """Yield the values of `mscale_all_dim` of a config.json."""
    for name in ("rope_scaling", "rope_parameters"):
        table = config.get(name)
        value = table.get("mscale_all_dim") if isinstance(table, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value
