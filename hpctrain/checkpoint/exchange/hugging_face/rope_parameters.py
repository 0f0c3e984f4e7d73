"""Rotary positions in config.json of `transformers`: their base and the scaling of their frequencies.

Files of version 5 have both in `rope_parameters`. Older files have `rope_theta`, which GPT-NeoX calls
`rotary_emb_base`, and beside it `rope_scaling` if the frequencies are scaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, get_args

from pydantic import ValidationError

from hpctrain.checkpoint.exchange.hugging_face.yarn_scale import (
    default_attention_factor,
    yarn_attention_factor,
)
from hpctrain.deck.family import ROPE_KEYS
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

_NO_KEYS: Mapping[str, float] = MappingProxyType({})
_KINDS = get_args(RopeScaling.model_fields["kind"].annotation)


@dataclass(frozen=True)
class RotaryPositions:
    """Rotary positions that a config.json describes.

    Attributes:
        base: Base of the frequencies.
        fraction: Share of the features of a head that are rotated.
        scaling: Scaling of the frequencies; None if they are not scaled.
        mscale_all_dim: Key of "yarn" that says by how much latent attention multiplies its scores; None if it
            does not.
    """

    base: float
    fraction: float
    scaling: RopeScaling | None = None
    mscale_all_dim: float | None = None


class RopeParametersReader:
    """Reader of the rotary positions of a config.json, which collects what is wrong with them.

    Args:
        config: Content of the config.json.
        default_base: Base of the frequencies if the file does not have it.
        default_fraction: Share of the features of a head that are rotated if the file does not have it. None
            if files of this architecture cannot have it, so that all features are rotated.
        names: Keys of the base and of this share beside `rope_parameters`.
        longrope_original: Sequence length before "longrope", for files without
            `original_max_position_embeddings` beside `rope_parameters`. None for the length in that table.

    Attributes:
        problems: What is wrong, in the order in which it was found.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        default_base: float,
        default_fraction: float | None = None,
        names: tuple[str, str] = ROPE_KEYS,
        longrope_original: int | None = None,
    ) -> None:
        self.problems: list[Problem] = []
        self._config = config
        self._longrope_original = longrope_original
        self._names = names
        base_key, fraction_key = names
        self._base = self._number(base_key, config.get(base_key), default_base)
        self._fraction = 1.0
        self._reads_fraction = default_fraction is not None
        if default_fraction is not None:
            self._fraction = self._share(fraction_key, config.get(fraction_key), default_fraction)

    def read(self, sequence: int, head_size: int) -> RotaryPositions:
        """Return the rotary positions, which are any valid ones if there are problems.

        Args:
            sequence: Value of max_position_embeddings.
            head_size: Number of features of an attention head.
        """
        keys = [key for key in ("rope_scaling", "rope_parameters") if self._config.get(key) not in (None, {})]
        tables = [self._read_table(key, self._config[key], sequence, head_size) for key in keys]
        if len(tables) == 2 and tables[0] != tables[1] and not self.problems:
            self.problems.append((keys[0], self._config[keys[0]], f"contradicts {keys[1]}"))
        positions = tables[0] if tables else RotaryPositions(self._base, self._fraction)
        self._refuse_ignored_keys(positions)
        return positions

    def _refuse_ignored_keys(self, positions: RotaryPositions) -> None:
        """Report keys with the usual names that `transformers` ignores here and that say something else."""
        values = positions.base, positions.fraction
        for used, usual, value in zip(self._names, ROPE_KEYS, values, strict=True):
            ignored = self._config.get(usual)
            if used != usual and ignored not in (None, value):
                message = f"ignored by transformers, which computes with {value:g} here; set {used}"
                self.problems.append((usual, ignored, message))

    def _read_table(self, key: str, table: object, sequence: int, head_size: int) -> RotaryPositions:
        """Return the positions that the table `rope_scaling` or `rope_parameters` describes."""
        before = len(self.problems)
        if not isinstance(table, dict):
            self.problems.append((key, table, "must be an object"))
            return RotaryPositions(self._base, self._fraction)
        values = {name: value for name, value in table.items() if value is not None}
        base = self._number(f"{key}: rope_theta", values.pop("rope_theta", None), self._base)
        if "rope_theta" in table and table["rope_theta"] is None:
            self.problems.append((f"{key}: rope_theta", None, "must be a number above 0"))
        for name in [name for name, value in values.items() if isinstance(value, dict)]:
            message = "unsupported: all layers of this architecture have the same rotary positions"
            self.problems.append((f"{key}: {name}", values.pop(name), message))
        unscaled = RotaryPositions(base, self._table_fraction(key, values.pop(ROPE_KEYS[1], None)))
        kind = self._kind(key, table)
        if kind == "default":
            return unscaled
        for name in ("type", "rope_type"):
            values.pop(name, None)
        self._resolve_original(key, kind, values, sequence)
        if kind == "yarn" and "truncate" in table:
            values.setdefault("truncate", False)  # null is false in transformers
        mscale_all_dim = self._mscale_all_dim(key, values) if kind == "yarn" else None
        if len(self.problems) > before:
            return unscaled
        original: Any = values.get(_ORIGINAL)
        is_derived = kind == "yarn" and table.get("factor", 1) is None
        if is_derived and _is_number(original) and sequence < original:
            message = (
                f"requires max_position_embeddings of at least {_ORIGINAL} = {original}, but it is {sequence}"
            )
            self.problems.append((f"{key}: factor", None, message))
            return unscaled
        if kind == "longrope" or "factor" in table:
            _resolve_factors(kind, values, sequence)
        scaling = self._scaling(key, kind, values)
        if scaling is not None:
            rotated = rotated_features(head_size, unscaled.fraction)
            self.problems += _contradictions(key, scaling, rotated, base)
        if len(self.problems) > before:
            return unscaled
        return replace(unscaled, scaling=scaling, mscale_all_dim=mscale_all_dim)

    def _table_fraction(self, key: str, value: object) -> float:
        """Return the share of rotated features that a table says, or else that of the keys beside it."""
        if not self._reads_fraction:
            return self._fraction
        return self._share(f"{key}: {ROPE_KEYS[1]}", value, self._fraction)

    def _kind(self, key: str, table: Mapping[str, object]) -> str:
        """Return the kind of scaling of a table: "default" for none, and for an unsupported one."""
        kind = table.get("rope_type", table.get("type", "default"))  # null is an error in transformers, too
        kind = "longrope" if kind == "su" else kind  # its name in the first files of Phi-3
        if isinstance(kind, str) and kind in ("default", *_KINDS):
            return kind
        message = f"unsupported; expected {either(map(repr, ('default', *_KINDS)))}"
        self.problems.append((f"{key}: rope_type", kind, message))
        return "default"

    def _resolve_original(self, key: str, kind: str, values: dict[str, Any], sequence: int) -> None:
        """Set the length of the sequence before the scaling as `transformers` does; drop it for "linear"."""
        if kind == "linear":
            values.pop(_ORIGINAL, None)
        elif kind == "dynamic":
            original = values.setdefault(_ORIGINAL, sequence)
            if original != sequence:  # transformers ignores it
                message = f"must be max_position_embeddings = {sequence} with rope_type = {kind!r}"
                self.problems.append((f"{key}: {_ORIGINAL}", original, message))
        else:
            default = self._longrope_original if kind == "longrope" else None
            values[_ORIGINAL] = self._original_length(
                key, values.get(_ORIGINAL, default or sequence), default
            )

    def _mscale_all_dim(self, key: str, values: Mapping[str, Any]) -> float | None:
        """Return `mscale_all_dim` of "yarn", None if it is 0 or missing; check `mscale`, too."""
        for name in ("mscale", "mscale_all_dim"):
            if not _is_number(value := values.get(name) or 1):
                self.problems.append((f"{key}: {name}", value, "must be a number of at least 0"))
        return values.get("mscale_all_dim") or None

    def _original_length(self, key: str, in_table: object, default: int | None) -> object:
        """Return the length before scaling: that beside the table or `default`, or else that in the table."""
        if default is None or _ORIGINAL in self._config:
            return self._config.get(_ORIGINAL, in_table)
        if in_table != default:
            message = f"ignored by transformers, which computes with {default} here; set it beside this table"
            self.problems.append((f"{key}: {_ORIGINAL}", in_table, message))
        return default

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

    def _share(self, key: str, value: object, default: float) -> float:
        """Return a number above 0 and at most 1, or report it."""
        fraction = self._number(key, value, default)
        if fraction > 1:
            self.problems.append((key, value, "must be at most 1"))
        return min(1.0, fraction)

    def _number(self, key: str, value: object, default: float) -> float:
        """Return a number above 0, or report it and return the default."""
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
    factor: Any = values.get("factor")
    if "attention_factor" not in values and all(scales) and _is_number(factor):
        attention_factor = yarn_attention_factor(factor, *scales)
        if attention_factor != default_attention_factor(factor):
            values["attention_factor"] = attention_factor


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
    yarn_keys: Mapping[str, float] = _NO_KEYS,
    names: tuple[str, str] = ROPE_KEYS,
) -> dict[str, Any]:
    """Return the keys of a config.json that describe rotary positions, those of old and new versions.

    Args:
        base: Base of the frequencies.
        scaling: Scaling of the frequencies; None if they are not scaled.
        fraction: Share of the features of a head that are rotated; None where files do not say it.
        yarn_keys: Values of `latent_yarn_keys`, which replace `attention_factor`.
        names: Keys of the base and of `fraction` beside `rope_parameters`.
    """
    parameters: dict[str, Any] = {"rope_theta": base, "rope_type": "default"}
    keys: dict[str, Any] = {names[0]: base, "rope_parameters": parameters}
    if scaling is not None:
        values = _scaling_config(scaling)
        if yarn_keys:
            values.pop("attention_factor", None)
        keys["rope_scaling"] = {**values, **yarn_keys}
        keys["rope_parameters"] = parameters = {"rope_theta": base, **keys["rope_scaling"]}
    if fraction is not None:
        keys[names[1]] = parameters["partial_rotary_factor"] = fraction
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


def _scaling_config(scaling: RopeScaling) -> dict[str, Any]:
    """Return the keys of a config.json that describe a scaling of the frequencies."""
    return {
        _HF_KEYS.get(name, name): list(value) if isinstance(value, tuple) else value
        for name, value in scaling_values(scaling).items()
        if (scaling.kind, name) != ("dynamic", "original_sequence")
    }
