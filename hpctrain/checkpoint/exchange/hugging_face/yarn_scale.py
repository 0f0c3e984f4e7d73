"""Keys `mscale` and `mscale_all_dim` of "yarn", which determine two factors of latent attention.

`mscale_all_dim` multiplies the scores. The quotient of factors by `mscale` and by `mscale_all_dim` multiplies
the rotated queries and keys, unless a file has their `attention_factor`. vLLM reads only the first two keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf, log, nextafter, sqrt
from types import MappingProxyType
from typing import Any

from hpctrain.model.shape import ModelShape

_NONE: Mapping[str, Any] = MappingProxyType({})
_DIGITS = range(3, 17)
"""Numbers of digits to which a value is rounded, to find the value that a file would have."""


def yarn_attention_scale(head_size: int, factor: float, mscale_all_dim: float) -> float:
    """Return the factor of the products of queries and keys, as `transformers` computes it."""
    mscale = _yarn_mscale(factor, mscale_all_dim)
    scale: float = head_size**-0.5
    return scale * mscale * mscale


def yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Return the factor of rotated queries and keys, as `transformers` computes it.

    Args:
        factor: Factor of "yarn".
        mscale: Value of the key, above 0.
        mscale_all_dim: Value of the key, above 0.
    """
    return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)


def default_attention_factor(factor: float) -> float:
    """Return the factor of rotated queries and keys for a config.json without any of these keys."""
    return _yarn_mscale(factor, 1)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1 if factor > 1 else 1.0


def has_default_scale(shape: ModelShape) -> bool:
    """Return True if the factor of the products of queries and keys is 1 / sqrt(head_size)."""
    return shape.attention_scale in {None, shape.head_size**-0.5, 1 / sqrt(shape.head_size)}


def mscale_all_dim_of(shape: ModelShape, imported: Mapping[str, Any] = _NONE) -> float | None:
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
    candidates = (*_imported_values(imported, "mscale_all_dim"), *_roundings(value))
    return (
        _first_exact(
            candidates, lambda each: yarn_attention_scale(shape.head_size, scaling.factor, each), scale
        )
        or value
        or None
    )


def latent_yarn_keys(shape: ModelShape, imported: Mapping[str, Any] = _NONE) -> dict[str, float]:
    """Return the keys of "yarn" that determine the factors of latent attention.

    `attention_factor` is among them only if no other keys give it exactly. The result is empty if there is
    no latent attention, or if its factors are those without any keys.

    Args:
        shape: Shape of the model.
        imported: The config.json that the model was imported with, whose values are preferred; empty if it
            was not imported.
    """
    scaling = shape.rope_scaling
    if shape.latent is None or scaling is None or scaling.kind != "yarn" or scaling.factor <= 1:
        return {}
    all_dim = mscale_all_dim_of(shape, imported)
    if all_dim is None and scaling.attention_factor is None:
        return {}
    default = default_attention_factor(scaling.factor)
    factor = default if scaling.attention_factor is None else scaling.attention_factor
    value = (factor * _yarn_mscale(scaling.factor, all_dim or 0) - 1) / (0.1 * log(scaling.factor))
    keys = {"mscale_all_dim": all_dim or 0.0}
    if value >= 0:
        candidates = (*_imported_values(imported, "mscale"), keys["mscale_all_dim"], *_roundings(value))
        exact = _first_exact(
            candidates,
            lambda each: yarn_attention_factor(scaling.factor, each, keys["mscale_all_dim"]),
            factor,
        )
        keys["mscale"] = value if exact is None else exact
        if exact and all_dim:
            return keys
    return {**keys, "attention_factor": factor}


def _roundings(value: float) -> Iterator[float]:
    """Yield a number rounded to few digits, then to more, and then its neighboring numbers."""
    yield from (round(value, digits) for digits in _DIGITS)
    for end in (-inf, inf):
        near = value
        for _ in range(4):
            near = nextafter(near, end)
            yield near


def _first_exact(
    candidates: Iterator[float] | tuple[float, ...], function: Callable[[float], float], result: float
) -> float | None:
    """Return the first candidate from which a function computes exactly this result; None if none does."""
    return next((each for each in candidates if function(each) == result), None)


def _imported_values(config: Mapping[str, Any], key: str) -> Iterator[float]:
    """Yield the values of a key of "yarn" in a config.json."""
    for name in ("rope_scaling", "rope_parameters"):
        table = config.get(name)
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value
