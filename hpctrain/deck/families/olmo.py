"""OLMo, OLMo 2 and OLMo 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpctrain.deck.families.preset_keys import model_keys
from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, ModelType, WindowKeys

_OLMO = ModelType(
    architecture="OlmoForCausalLM",
    model_type="olmo",
    sizes=(50304, 2048, 4096, 32, 32, 11008),
    epsilon=("", 1e-5),
    keys=(ConfigKey("clip_qkv", "query_key_value_clip", None, "cap"),),
)
_OLMO2 = ModelType(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    sizes=(50304, 2048, 4096, 32, 32, 11008),
    epsilon=("rms_norm_eps", 1e-5),
    layers=(
        ("model.layers.{}.post_attention_layernorm", "blocks.{}.attention_output_norm"),
        ("model.layers.{}.post_feedforward_layernorm", "blocks.{}.feed_forward_output_norm"),
    ),
    reward_architecture="Olmo2ForSequenceClassification",
)
_OLMO3 = replace(
    _OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    rope_base=500_000.0,
    windows=WindowKeys(4096, has_layer_types=True, full_every=4),
    local_rope=True,
    reward_architecture="Olmo3ForSequenceClassification",
)

FAMILIES: Mapping[str, Family] = {
    "olmo": Family(
        defaults=FamilyDefaults(norm="layer", norm_weight="none"),
        model_types=(_OLMO,),
        presets={
            "olmo-1b": {
                "source": "OLMo: Groeneveld et al. 2024, arXiv 2402.00838",
                "sequence": 2048,
                "model": model_keys(16, 2048, 16, 16, 8192, 50304, 1e-5, tied=True),
            },
            "olmo-7b": {
                "source": "OLMo: Groeneveld et al. 2024, arXiv 2402.00838",
                "sequence": 2048,
                "model": model_keys(32, 4096, 32, 32, 11008, 50304, 1e-5),
            },
            "olmo-7b-0424": {
                "source": "OLMo 1.7: Groeneveld et al. 2024, huggingface.co/allenai",
                "sequence": 4096,
                "model": model_keys(32, 4096, 32, 32, 11008, 50304, 1e-5, query_key_value_clip=8.0),
            },
        },
    ),
    "olmo2": Family(
        defaults=FamilyDefaults(norm_placement="after", query_key_norm="all"),
        model_types=(_OLMO2,),
        presets={
            f"olmo2-{name}": {
                "source": "OLMo 2: OLMo et al. 2024, arXiv 2501.00656",
                "sequence": 4096,
                "model": model_keys(*sizes, 100352, 1e-6, rope_base=5e5),
            }
            for name, sizes in {
                "1b": (16, 2048, 16, 16, 8192),
                "7b": (32, 4096, 32, 32, 11008),
                "13b": (40, 5120, 40, 40, 13824),
                "32b": (64, 5120, 40, 8, 27648),
            }.items()
        },
    ),
    "olmo3": Family(
        defaults=FamilyDefaults(norm_placement="after", query_key_norm="all", windows=(4096, 4096, 4096, 0)),
        model_types=(_OLMO3,),
        presets={
            f"olmo3-{name}": {
                "source": "OLMo 3: Team Olmo 2025, huggingface.co/allenai",
                "sequence": 8192,
                "model": model_keys(*sizes, 100278, 1e-6, rope_base=5e5, rope_local_base=5e5),
                "rope_scaling": {"kind": "yarn", "factor": 8.0, "original_sequence": 8192},
            }
            for name, sizes in {
                "7b": (32, 4096, 32, 32, 11008),
                "32b": (64, 5120, 40, 8, 27648),
            }.items()
        },
    ),
}
"""Families of this module by the value of model.family."""
