"""Keys of a config.json that change what models of some architectures compute.

`transformers` ignores a key that an architecture does not have. A model with such a key would silently be
another model than the one that was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

ROPE_TABLES = ("rope_parameters", "rope_scaling")
"""Keys of the table of rotary positions, of the newer and of the older generation of configurations."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "sliding_window": (None,),
        "layer_types": (None, "full_attention"),
        "use_bidirectional_attention": (None, False),
        "is_encoder_decoder": (None, False),
        "use_parallel_residual": (None, False),
        "attn_logit_softcapping": (None, 0),
        "final_logit_softcapping": (None, 0),
        "clip_qkv": (None,),
        "attention_chunk_size": (None,),
        "softmax_scale": (None,),
        "query_pre_attn_scalar": (None,),
        "attention_multiplier": (None,),
        "embedding_multiplier": (None, 1),
        "scale_emb": (None, 1),
        "scale_depth": (None,),
        "residual_multiplier": (None, 1),
        "logits_scaling": (None, 1),
        "logit_scale": (None, 1),
        "routed_scaling_factor": (None, 1),
        "swiglu_limit": (None,),
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "alibi": (None, False),
        "use_rope": (None, True),
        "no_rope_layers": (None, 1),
        "no_rope_layer_interval": (None,),
        "partial_rotary_factor": (None, 1),
        "rotary_pct": (None, 1),
        "rope_local_base_freq": (None,),
        "rope_parameters": (None, "default"),
        "rope_scaling": (None, "default"),
        "num_nextn_predict_layers": (None, 0),
    }
)
"""Values with which a model computes the same as without the key.

The values of a key that may be a list are those of its elements. Those of a table of rotary positions are
values of `rope_type`.
"""


def computation_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a config.json that change what a model computes, and their values.

    Keys with a neutral value are left out, such as `sliding_window` = null.

    Args:
        config: Content of the config.json.
    """
    for key, neutral in NEUTRAL_VALUES.items():
        value = config.get(key)
        is_unused = key == "sliding_window" and config.get("use_sliding_window") is False
        if not is_unused and any(each not in neutral for each in _elements(key, value)):
            yield key, value
    for name in ROPE_TABLES:
        for table in _rope_tables(config.get(name)):
            fraction = table.get("partial_rotary_factor")
            if fraction not in NEUTRAL_VALUES["partial_rotary_factor"]:
                yield "partial_rotary_factor", fraction


def ignored_key_problem(model_type: str) -> str:
    """Return the problem of a computation key that `transformers` ignores in models of a type."""
    ignored = f"{model_type} models of transformers ignore this key, which changes what other models compute"
    return f"{ignored}; remove it if the weights were trained without it"


def rope_types(value: object) -> Iterator[Any]:
    """Yield the `rope_type` of a table of rotary positions, or those of its tables for each type of layer."""
    for table in _rope_tables(value):
        yield table.get("rope_type", table.get("type", "default"))


def _rope_tables(value: object) -> Sequence[Mapping[str, Any]]:
    """Return a table of rotary positions, or its tables for each type of layer; none if it is no table."""
    if not isinstance(value, dict):
        return []
    return [each for each in value.values() if isinstance(each, dict)] or [value]


def _elements(key: str, value: Any) -> Iterator[Any]:
    """Yield the elements of a list, the types of a table of rotary positions, or a single value."""
    if key in ROPE_TABLES and isinstance(value, dict):
        yield from rope_types(value)
    elif isinstance(value, list):
        yield from value
    else:
        yield value
