"""gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.deck.families.preset_keys import expert_keys, model_keys
from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, MixtureFiles, ModelType, WindowKeys

_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS = ModelType(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    sizes=(201088, 131072, 2880, 36, 64, 2880),
    key_value_heads=8,
    head_size=64,
    epsilon=("rms_norm_eps", 1e-5),
    rope_base=150_000.0,
    rope_parameters=_GPT_OSS_YARN,
    layers=(("model.layers.{}.self_attn", "blocks.{}.attention"),),
    keys=(ConfigKey("attention_bias", "attention_bias", True, choices=((True, "all"), (False, "none"))),),
    required_values={"swiglu_alpha": (1.702, 1.702), "swiglu_limit": (7.0, 7.0)},
    windows=WindowKeys(128, has_layer_types=True, full_every=2),
    mixture=MixtureFiles(
        sizes={"count": ("num_local_experts", 128), "per_token": ("num_experts_per_tok", 4)},
        layers=(("model.layers.{}.mlp.router", "blocks.{}.feed_forward.router"),),
        gate_up=("model.layers.{}.mlp.experts.gate_up_proj",),
        down="model.layers.{}.mlp.experts.down_proj",
        gates="interleaved",
        transposed=True,
        suffixes={"weight": "", "bias": "_bias"},
    ),
    quantization="mxfp4",
)

FAMILIES: Mapping[str, Family] = {
    "gpt-oss": Family(
        defaults=FamilyDefaults(
            windows=(128, 0),
            attention_sinks=True,
            attention_bias="all",
            mlp_bias=True,
            activation="swiglu-clamped",
        ),
        experts={"router_bias": True},
        model_types=(_GPT_OSS,),
        presets={
            f"gpt-oss-{name}": {
                "source": "gpt-oss: OpenAI 2025, arXiv 2508.10925",
                "sequence": 131072,
                "model": model_keys(
                    layers, 2880, 64, 8, 2880, 201088, 1e-5, head_size=64, rope_base=150_000.0
                ),
                "experts": expert_keys(count, 4, 2880, True),
                "rope_scaling": {
                    "kind": "yarn",
                    "factor": 32.0,
                    "original_sequence": 4096,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                },
            }
            for name, layers, count in (("20b", 24, 32), ("120b", 36, 128))
        },
    ),
}
"""Families of this module by the value of model.family."""
