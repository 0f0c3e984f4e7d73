"""Llama and the models of its shape: Mistral, Qwen, OLMoE, dots.llm1."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hpctrain.deck.families.preset_keys import expert_keys, model_keys
from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, MixtureFiles, ModelType, WindowKeys

_QWEN2_MOE = ModelType(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    sizes=(151936, 32768, 2048, 24, 16, 5632),
    key_value_heads=16,
    keys=(
        ConfigKey("qkv_bias", "attention_bias", True, choices=((True, "query_key_value"), (False, "none"))),
    ),
    attention_biases=("none", "query_key_value"),
    windows=WindowKeys(4096, has_layer_types=True, requires_layer_types=True, has_use_flag=True),
    mixture=MixtureFiles(
        sizes={
            "experts": ("num_experts", 60),
            "experts_per_token": ("num_experts_per_tok", 4),
            "expert_mlp": ("moe_intermediate_size", 1408),
            "expert_every": ("decoder_sparse_step", 1),
        },
        layers=(
            ("model.layers.{}.mlp.gate", "blocks.{}.feed_forward.router"),
            *(
                (
                    f"model.layers.{{}}.mlp.shared_expert.{name}_proj",
                    f"blocks.{{}}.feed_forward.shared.{name}",
                )
                for name in ("gate", "up", "down")
            ),
            ("model.layers.{}.mlp.shared_expert_gate", "blocks.{}.feed_forward.shared_gate"),
        ),
        gate_up=("model.layers.{}.mlp.experts.{}.gate_proj", "model.layers.{}.mlp.experts.{}.up_proj"),
        down="model.layers.{}.mlp.experts.{}.down_proj",
        normalizes=False,
        shared_width=("shared_expert_intermediate_size", 5632),
    ),
    constant_fields={"shared_gate": True},
)
_QWEN2_BIASES = {"attention_bias": "query_key_value"}
"""Biases of the attention of Qwen2 and Qwen2-MoE."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            defaults=FamilyDefaults(),
            model_types=(_QWEN2_MOE,),
            presets={
                "mixtral-8x22b": {
                    "source": "Mixtral 8x22B: Mistral AI 2024, huggingface.co/mistralai",
                    "sequence": 65536,
                    "model": model_keys(56, 6144, 48, 8, 16384, 32000, 1e-5, rope_base=1e6),
                    "experts": expert_keys(8, 2, 16384, True),
                },
                "qwen1.5-moe-a2.7b": {
                    "source": "Qwen1.5-MoE: Qwen Team 2024, qwenlm.github.io/blog/qwen-moe",
                    "sequence": 8192,
                    "model": model_keys(24, 2048, 16, 16, 5632, 151936, 1e-6, rope_base=1e6, **_QWEN2_BIASES),
                    "experts": expert_keys(60, 4, 1408, False, shared=4, shared_gate=True),
                },
                "qwen2-57b-a14b": {
                    "source": "Qwen2: Yang et al. 2024, arXiv 2407.10671",
                    "sequence": 32768,
                    "model": model_keys(28, 3584, 28, 4, 18944, 151936, 1e-6, rope_base=1e6, **_QWEN2_BIASES),
                    "experts": expert_keys(64, 8, 2560, False, shared=8, shared_gate=True),
                },
                "qwen3-235b-a22b": {
                    "source": "Qwen3: Yang et al. 2025, arXiv 2505.09388",
                    "sequence": 32768,
                    "model": model_keys(
                        94,
                        4096,
                        64,
                        4,
                        12288,
                        151936,
                        1e-6,
                        head_size=128,
                        query_key_norm="head",
                        rope_base=1e6,
                    ),
                    "experts": expert_keys(128, 8, 1536, True),
                },
            },
        ),
    }
)
"""Families of this module by the value of model.family."""
