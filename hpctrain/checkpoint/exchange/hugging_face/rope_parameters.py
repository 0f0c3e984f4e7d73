"""Rotary positions in config.json of `transformers`: their base and the scaling of their frequencies.

Files of version 5 have both in `rope_parameters`. Older files have `rope_theta`, and beside it `rope_scaling`
if the frequencies are scaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log
from types import MappingProxyType
from typing import Any, get_args

from pydantic import ValidationError

from hpctrain.deck.key_messages import expected_value
from hpctrain.deck.sections.rope_scaling import (
    ORDERED_KEYS,
    RopeScaling,
    keys_of_kind,
    rotated_features,
    scaling_problems,
    scaling_values,
)
from hpctrain.text import either

Problem = tuple[str, object, str]
"""Key of a config.json, its value, and what is wrong with it."""

_ORIGINAL = "original_max_position_embeddings"
_HF_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "kind": "rope_type",
        "original_sequence": _ORIGINAL,
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "short_factors": "short_factor",
        "long_factors": "long_factor",
    }
)
"""Names in a config.json of the keys of [model.rope_scaling] that have another name there."""

_KINDS = get_args(RopeScaling.model_fields["kind"].annotation)


class RopeParametersReader:
    """Reader of the rotary positions of a config.json, which collects what is wrong with them.

    Attributes:
        problems: What is wrong, in the order in which it was found.
        mscale_all_dim: Key of "yarn" that says by how much latent attention multiplies its scores; None if it
            does not.
    """

    def __init__(
        self, config: Mapping[str, Any], default_base: float, default_fraction: float | None = None
    ) -> None:
        self.problems: list[Problem] = []
        self._config = config
        has_neox_key = default_fraction is not None and "rotary_emb_base" in config
        key = "rotary_emb_base" if has_neox_key else "rope_theta"
        self._base = self._number(key, config.get(key), default_base)
        self.fraction = 1.0
        self.mscale_all_dim: float | None = None
        self._reads_fraction = default_fraction is not None
        if default_fraction is not None:
            key = "rotary_pct" if "rotary_pct" in config else "partial_rotary_factor"
            self.fraction = self._fraction(key, config.get(key), default_fraction)

    def read(self, sequence: int, head_size: int) -> tuple[float, RopeScaling | None]:
        """Return the base of the frequencies and their scaling, None if they are not scaled.

        If there are problems, the result is any valid value.

        Args:
            sequence: Value of max_position_embeddings.
            head_size: Number of features of an attention head.
        """
        tables = ("rope_scaling", "rope_parameters")
        for key in tables if self._reads_fraction else ():
            table = self._config.get(key)
            value = table.get("partial_rotary_factor") if isinstance(table, dict) else None
            self.fraction = self._fraction(f"{key}: partial_rotary_factor", value, self.fraction)
        head_size = rotated_features(head_size, self.fraction)
        keys = [key for key in tables if self._config.get(key) not in (None, {})]
        results = [self._read_table(key, self._config[key], sequence, head_size) for key in keys]
        if len(results) == 2 and results[0] != results[1] and not self.problems:
            self.problems.append((keys[0], self._config[keys[0]], f"contradicts {keys[1]}"))
        return results[0] if results else (self._base, None)

    def _read_table(
        self, key: str, table: object, sequence: int, head_size: int
    ) -> tuple[float, RopeScaling | None]:
        """Return the base and the scaling that `rope_scaling` or `rope_parameters` describes."""
        before = len(self.problems)
        if not isinstance(table, dict):
            self.problems.append((key, table, "must be an object"))
            return self._base, None
        values = {name: value for name, value in table.items() if value is not None}
        base = self._number(f"{key}: rope_theta", values.pop("rope_theta", None), self._base)
        if "rope_theta" in table and table["rope_theta"] is None:
            self.problems.append((f"{key}: rope_theta", None, "must be a number above 0"))
        for name in [name for name, value in values.items() if isinstance(value, dict)]:
            message = "unsupported: all layers of this architecture have the same rotary positions"
            self.problems.append((f"{key}: {name}", values.pop(name), message))
        partial = values.pop("partial_rotary_factor", 1)
        older_kind = values.pop("type", "default")
        kind = values.pop("rope_type", older_kind)
        kind = "longrope" if kind == "su" else kind  # its name in the first files of Phi-3
        if kind not in ("default", *_KINDS):
            message = f"unsupported; expected {either(map(repr, ('default', *_KINDS)))}"
            self.problems.append((f"{key}: rope_type", kind, message))
            return base, None
        if partial != 1 and not self._reads_fraction:
            message = "unsupported: rotary positions rotate whole heads"
            self.problems.append((f"{key}: partial_rotary_factor", partial, message))
        if kind == "default":
            return base, None
        if kind == "linear":
            values.pop(_ORIGINAL, None)
        elif kind == "dynamic":
            original = values.setdefault(_ORIGINAL, sequence)
            if original != sequence:  # transformers ignores it
                message = f"must be max_position_embeddings = {sequence} with rope_type = {kind!r}"
                self.problems.append((f"{key}: {_ORIGINAL}", original, message))
        else:
            values[_ORIGINAL] = self._config.get(_ORIGINAL, values.get(_ORIGINAL, sequence))
        if kind == "yarn" and _is_number(mscale := values.get("mscale_all_dim")):
            self.mscale_all_dim = mscale
        if kind == "longrope" or "factor" in table:
            _resolve_factors(kind, values, sequence)
        scaling = self._scaling(key, kind, values)
        if scaling is not None:
            self.problems += _contradictions(key, scaling, head_size, base)
        return base, scaling if len(self.problems) == before else None

    def _scaling(self, key: str, kind: str, values: Mapping[str, object]) -> RopeScaling | None:
        """Return the scaling that a table describes; None, with problems, if it is not valid."""
        own_names = {_HF_KEYS.get(name, name): name for name in keys_of_kind(kind) if name != "kind"}
        for name in sorted(values.keys() - own_names.keys()):
            message = f"unsupported with rope_type = {kind!r}"
            self.problems.append((f"{key}: {name}", values[name], message))
        for name in ("factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"):
            if name in own_names and name not in values:
                self.problems.append((key, self._config[key], f"requires {name} with rope_type = {kind!r}"))
                return None
        fields = {own_names[name]: value for name, value in values.items() if name in own_names}
        try:
            return RopeScaling.model_validate({"kind": kind, **fields})
        except ValidationError as error:
            for each in error.errors(include_url=False):
                own = str(each["loc"][0])
                message = f"must be {expected_value(RopeScaling.model_fields[own])}"
                self.problems.append((f"{key}: {_HF_KEYS.get(own, own)}", fields[own], message))
        return None

    def _fraction(self, key: str, value: object, default: float) -> float:
        fraction = self._number(key, value, default)
        if fraction > 1:
            self.problems.append((key, value, "must be at most 1"))
        return min(1.0, fraction)

    def _number(self, key: str, value: object, default: float) -> float:
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.problems.append((key, value, "must be a number above 0"))
            return default
        return float(value)


def _resolve_factors(kind: str, values: dict[str, Any], sequence: int) -> None:
    """Replace what `transformers` derives from further keys by the factor and the attention factor."""
    has_original = kind in {"yarn", "longrope"} and _is_number(values[_ORIGINAL])
    if has_original and "factor" not in values:
        values["factor"] = max(1.0, sequence / values[_ORIGINAL])
    if kind != "yarn":
        return
    for name in ("beta_fast", "beta_slow"):
        if not values.get(name, True):
            del values[name]
    scales = values.pop("mscale", None), values.pop("mscale_all_dim", None)
    if "attention_factor" not in values and all(map(_is_number, (*scales, values.get("factor")))):
        numerator, denominator = (0.1 * scale * log(max(1.0, values["factor"])) + 1 for scale in scales)
        values["attention_factor"] = numerator / denominator


def _is_number(value: object) -> bool:
    """Return True for a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _contradictions(key: str, scaling: RopeScaling, head_size: int, base: float) -> Iterator[Problem]:
    """Yield the problems of a scaling whose keys are valid by themselves."""
    for name, sentence in scaling_problems(scaling, head_size, base):
        yield f"{key}: {_HF_KEYS.get(name, name)}", getattr(scaling, name), sentence
    for name, limit, below in ORDERED_KEYS:
        value, most = getattr(scaling, name), getattr(scaling, limit)
        if name in keys_of_kind(scaling.kind) and (value >= most if below else value > most):
            sentence = f"must be {'below' if below else 'at most'} {_HF_KEYS.get(limit, limit)} = {most:g}"
            yield f"{key}: {_HF_KEYS.get(name, name)}", value, sentence


def rope_config(
    base: float,
    scaling: RopeScaling | None,
    fraction: float | None = None,
    mscale_all_dim: float | None = None,
) -> dict[str, Any]:
    """Return the keys of a config.json that describe rotary positions, those of old and new versions.

    Args:
        base: Base of the frequencies.
        scaling: Scaling of the frequencies; None if they are not scaled.
        fraction: Share of the features of a head that are rotated; None where files do not say it.
        mscale_all_dim: Key of "yarn" for the scores of latent attention; None if these are not multiplied.
    """
    keys = _rope_config(base, scaling)
    if mscale_all_dim is not None:
        for name in ("rope_scaling", "rope_parameters"):
            keys[name]["mscale_all_dim"] = mscale_all_dim
            if keys[name].get("attention_factor") == 1:  # as most files say it
                keys[name]["mscale"] = mscale_all_dim
                del keys[name]["attention_factor"]
    if fraction is not None:
        keys["partial_rotary_factor"] = fraction
        keys["rope_parameters"]["partial_rotary_factor"] = fraction
    return keys


def local_rope_config(base: float, scaling: RopeScaling | None, local_base: float | None) -> dict[str, Any]:
    """Return the keys of a config.json whose layers with windows have rotary positions of their own.

    Args:
        base: Base of the frequencies of layers without a window.
        scaling: Scaling of these frequencies; None if they are not scaled.
        local_base: Base of the frequencies of layers with a window; None for those of the other layers.
    """
    keys = rope_config(base, scaling)
    local = keys if local_base is None else rope_config(local_base, None)
    tables = {"full_attention": keys["rope_parameters"], "sliding_attention": local["rope_parameters"]}
    return {**keys, "rope_local_base_freq": local["rope_theta"], "rope_parameters": tables}


def of_layer_type(config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """Return a config.json with the rotary positions of one type of layers in the place of those of all."""
    tables = config.get("rope_parameters")
    if not isinstance(tables, dict) or not {"full_attention", "sliding_attention"} & tables.keys():
        return config
    return {**config, "rope_parameters": tables.get(layer_type)}


def _rope_config(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_theta": base, "rope_parameters": {"rope_theta": base, "rope_type": "default"}}
    values = {
        _HF_KEYS.get(name, name): list(value) if isinstance(value, tuple) else value
        for name, value in scaling_values(scaling).items()
        if (scaling.kind, name) != ("dynamic", "original_sequence")
    }
    return {
        "rope_theta": base,
        "rope_scaling": values,
        "rope_parameters": {"rope_theta": base, **values},
    }
