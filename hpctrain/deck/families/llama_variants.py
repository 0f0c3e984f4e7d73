"""Families that differ from Llama in few keys: Phi-3 and Phi-4, SmolLM3, ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.deck.families.preset_keys import model_keys, preset_series
from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, ModelType, WindowKeys

_PHI3 = ModelType(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    sizes=(32064, 4096, 3072, 32, 32, 8192),
    epsilon=("rms_norm_eps", 1e-5),
    layers=(
        (
            "model.layers.{}.self_attn.qkv_proj",
            *(f"blocks.{{}}.attention.{name}" for name in ("query", "key", "value")),
        ),
        ("model.layers.{}.mlp.gate_up_proj", "blocks.{}.feed_forward.gate", "blocks.{}.feed_forward.up"),
    ),
    attention_biases=("none",),
    has_rotary_fraction=True,
    longrope_original=4096,
    rope_kinds=("longrope",),
    dropouts={"embd_pdrop": 0.0, "resid_pdrop": 0.0},
    windows=WindowKeys(None),
    reward_architecture="Phi3ForSequenceClassification",
)
_SMOLLM3 = ModelType(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    sizes=(128256, 32768, 2048, 36, 16, 11008),
    key_value_heads=4,
    tied=True,
    rope_base=2_000_000.0,
    keys=(
        ConfigKey("no_rope_layers", "rotation_pattern", ("no_rope_layer_interval", 4), "layers"),
        ConfigKey("mlp_bias", "mlp_bias", False),
    ),
    reward_architecture="SmolLM3ForSequenceClassification",
)
_ERNIE = ModelType(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    sizes=(103424, 131072, 1024, 18, 16, 3072),
    key_value_heads=2,
    head_size=128,
    epsilon=("rms_norm_eps", 1e-5),
    tied=True,
    rope_base=500_000.0,
    keys=(
        ConfigKey("use_bias", "attention_bias", False, choices=((True, "all"), (False, "none"))),
        ConfigKey("use_bias", "mlp_bias", False),
    ),
    training_noise={},
    interleaved=True,
)

FAMILIES: Mapping[str, Family] = {
    "phi3": Family(
        defaults=FamilyDefaults(),
        model_types=(_PHI3,),
        presets={
            **preset_series(
                "Phi-3: Abdin et al. 2024, arXiv 2404.14219",
                4096,
                {
                    "phi-3-mini": model_keys(32, 3072, 32, 32, 8192, 32064, 1e-5),
                    "phi-3-medium": model_keys(40, 5120, 40, 10, 17920, 32064, 1e-5),
                },
                {"windows": (2047,)},
            ),
            "phi-4": {
                "source": "Phi-4: Abdin et al. 2024, arXiv 2412.08905",
                "sequence": 16384,
                "model": model_keys(40, 5120, 40, 10, 17920, 100352, 1e-5, rope_base=250000.0),
            },
        },
    ),
    "smollm3": Family(
        defaults=FamilyDefaults(rotation_pattern=(True, True, True, False), tied=True),
        model_types=(_SMOLLM3,),
        presets={
            "smollm3-3b": {
                "source": "SmolLM3: Bakouch et al. 2025, huggingface.co/blog/smollm3",
                "sequence": 4096,
                "model": model_keys(36, 2048, 16, 4, 11008, 128256, 1e-6, rope_base=5e6),
            },
        },
    ),
    "ernie": Family(
        defaults=FamilyDefaults(tied=True),
        model_types=(_ERNIE,),
        presets={
            "ernie-4.5-0.3b": {
                "source": "ERNIE 4.5: Baidu 2025, huggingface.co/baidu",
                "sequence": 4096,
                "model": model_keys(18, 1024, 16, 2, 3072, 103424, 1e-5, head_size=128, rope_base=5e5),
            },
        },
    ),
}
"""Families of this module by the value of model.family."""
