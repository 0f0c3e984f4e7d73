"""GLM-4, in its versions of 2024 and 2025."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpctrain.deck.families.preset_keys import model_keys
from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, ModelType

_GLM = ModelType(
    architecture="GlmForCausalLM",
    model_type="glm",
    sizes=(151552, 131072, 4096, 40, 32, 13696),
    key_value_heads=2,
    head_size=128,
    epsilon=("rms_norm_eps", 1.5625e-7),
    layers=(
        ("model.layers.{}.mlp.gate_up_proj", "blocks.{}.feed_forward.gate", "blocks.{}.feed_forward.up"),
    ),
    keys=(
        ConfigKey(
            "attention_bias", "attention_bias", True, choices=((True, "query_key_value"), (False, "none"))
        ),
    ),
    attention_biases=("none", "query_key_value"),
    interleaved=True,
    reward_architecture="GlmForSequenceClassification",
)
_GLM4 = replace(
    _GLM,
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    layers=(
        *_GLM.layers,
        ("model.layers.{}.post_self_attn_layernorm", "blocks.{}.attention_output_norm"),
        ("model.layers.{}.post_mlp_layernorm", "blocks.{}.feed_forward_output_norm"),
    ),
    reward_architecture="Glm4ForSequenceClassification",
)

FAMILIES: Mapping[str, Family] = {
    "glm": Family(
        defaults=FamilyDefaults(rotary_fraction=0.5, attention_bias="query_key_value"),
        model_types=(_GLM,),
        presets={
            "glm-4-9b": {
                "source": "GLM-4: Team GLM 2024, arXiv 2406.12793",
                "sequence": 8192,
                "model": model_keys(40, 4096, 32, 2, 13696, 151552, 1.5625e-7, head_size=128),
            },
        },
    ),
    "glm4": Family(
        defaults=FamilyDefaults(rotary_fraction=0.5, attention_bias="query_key_value", norm_placement="both"),
        model_types=(_GLM4,),
        presets={
            "glm-4-32b": {
                "source": "GLM-4-32B-0414: model card of THUDM, 2025",
                "sequence": 32768,
                "model": model_keys(
                    61, 6144, 48, 2, 23040, 151552, 1e-5, head_size=128, attention_bias="none"
                ),
            },
        },
    ),
}
"""Families of this module by the value of model.family."""
