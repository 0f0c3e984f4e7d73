"""Keys of a config.json that change what a model computes, in the architectures that have them.

`transformers` ignores a key that an architecture does not have. A model with such a key would silently be
another model than the one that was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

ROPE_TABLES = ("rope_parameters", "rope_scaling")
"""Keys of the table of rotary positions, of the newer and of the older generation of configurations."""

_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "sliding_window": (None,),
        "layer_types": (None, "full_attention"),
        "use_bidirectional_attention": (None, False),
        "attn_logit_softcapping": (None, 0),
        "final_logit_softcapping": (None, 0),
        "clip_qkv": (None,),
        "query_pre_attn_scalar": (None,),
        "attention_multiplier": (None,),
        "embedding_multiplier": (None, 1),
        "residual_multiplier": (None, 1),
        "logits_scaling": (None, 1),
        "logit_scale": (None, 1),
        "routed_scaling_factor": (None, 1),
        "swiglu_limit": (None,),
        "alibi": (None, False),
        "no_rope_layers": (None, 1),
        "partial_rotary_factor": (None, 1),
        "rotary_pct": (None, 1),
        "rope_local_base_freq": (None,),
        "rope_parameters": (None, "default"),
        "rope_scaling": (None, "default"),
        "num_nextn_predict_layers": (None, 0),
    }
)
"""Values with which a model computes the same as without the key. For a list, they are those of its elements,
and for a table of rotary positions those of `rope_type`."""


def computation_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a config.json that change what a model computes, and their values.

    A key with a neutral value is left out, such as `sliding_window` of null.

    Args:
        config: Content of the config.json.
    """
    for key, neutral in _NEUTRAL_VALUES.items():
        value = config.get(key)
        is_unused = key == "sliding_window" and config.get("use_sliding_window") is False
        if not is_unused and any(each not in neutral for each in _elements(key, value)):
            yield key, value
    for table in ROPE_TABLES:
        nested = config.get(table)
        fraction = nested.get("partial_rotary_factor") if isinstance(nested, dict) else None
        if fraction not in (None, 1):
            yield "partial_rotary_factor", fraction


def rope_types(table: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the `rope_type` of a table of rotary positions, or those of its tables for each type of layer."""
    nested: list[Mapping[str, Any]] = [each for each in table.values() if isinstance(each, dict)]
    for each in nested or [table]:
        yield each.get("rope_type", each.get("type", "default"))


def _elements(key: str, value: Any) -> Iterator[Any]:
    """Yield the elements of a list, the types of a table of rotary positions, or a single value."""
    if key in ROPE_TABLES and isinstance(value, dict):
        yield from rope_types(value)
    elif isinstance(value, list):
        yield from value
    else:
        yield value
