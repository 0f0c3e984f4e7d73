"""Keys of a config.json that reading and writing have in common."""

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

EXPERTS = ("num_experts", "num_local_experts")
"""Keys of the number of experts, of which each version of `transformers` writes one."""


WITHOUT_EFFECT: Mapping[str, object] = MappingProxyType(
    {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": None,
        "attention_multiplier": None,
        "embedding_multiplier": 1,
        "residual_multiplier": 1,
        "logits_scaling": 1,
        "logit_scale": 1,
        "clip_qkv": None,
        "swiglu_limit": None,
        "routed_scaling_factor": 1,
        "use_parallel_residual": False,
        "use_bidirectional_attention": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": None,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "num_nextn_predict_layers": 0,
    }
)
"""Keys that change what some architectures compute or train without a tensor of their own, and their values
without an effect. Architectures that do not have such a key refuse other values; null has no effect, too."""


def deck_value(key: ConfigKey, value: float) -> float:
    """Return the value of the key of [model] for a number in config.json."""
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
