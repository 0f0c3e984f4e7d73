"""Llama and the models of its shape: Mistral, Qwen, OLMoE, dots.llm1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpctrain.deck.families.deepseek import deepseek_mixture
from hpctrain.deck.families.llama_presets import LLAMA_PRESETS
from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, MixtureFiles, ModelType, WindowKeys

_LLAMA = ModelType(
    architecture="LlamaForCausalLM",
    model_type="llama",
    sizes=(32000, 2048, 4096, 32, 32, 11008),
    keys=(ConfigKey("mlp_bias", "mlp_bias", False),),
    required_values={"sliding_window": (None, None)},
    heads_divide_hidden=True,
    reward_architecture="LlamaForSequenceClassification",
)
_ARCEE = replace(
    _LLAMA,
    architecture="ArceeForCausalLM",
    model_type="arcee",
    sizes=(32000, 4096, 2560, 32, 32, 18432),
    epsilon=("rms_norm_eps", 1e-5),
    activation=("hidden_act", "relu2"),
    gated=False,
    reward_architecture="ArceeForSequenceClassification",
)
_MISTRAL = ModelType(
    architecture="MistralForCausalLM",
    model_type="mistral",
    sizes=(32000, 131072, 4096, 32, 32, 14336),
    key_value_heads=8,
    attention_biases=("none",),
    windows=WindowKeys(4096),
    reward_architecture="MistralForSequenceClassification",
    layered_architecture="MinistralForCausalLM",
)
_MINISTRAL = replace(
    _MISTRAL,
    architecture="MinistralForCausalLM",
    model_type="ministral",
    windows=WindowKeys(4096, has_layer_types=True),
    reward_architecture="MinistralForSequenceClassification",
    layered_architecture="",
)
_QWEN2 = ModelType(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    sizes=(151936, 32768, 4096, 32, 32, 22016),
    key_value_heads=32,
    attention_biases=("query_key_value",),
    windows=WindowKeys(4096, has_layer_types=True, has_use_flag=True, first_full=28),
    reward_architecture="Qwen2ForSequenceClassification",
)
_QWEN3 = replace(
    _QWEN2,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    head_size=128,
    attention_biases=("none", "all"),
    constant_fields={"query_key_norm": "head"},
    reward_architecture="Qwen3ForSequenceClassification",
)
_MIXTRAL = ModelType(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    sizes=(32000, 131072, 4096, 32, 32, 14336),
    key_value_heads=8,
    epsilon=("rms_norm_eps", 1e-5),
    rope_base=1_000_000.0,
    attention_biases=("none",),
    training_noise={"attention_dropout": 0.0, "router_jitter_noise": 0.0},
    windows=WindowKeys(None),
    mixture=MixtureFiles(
        sizes={"count": ("num_local_experts", 8), "per_token": ("num_experts_per_tok", 2)},
        layers=(("model.layers.{}.block_sparse_moe.gate", "blocks.{}.feed_forward.router"),),
        gate_up=tuple(f"model.layers.{{}}.block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3")),
        down="model.layers.{}.block_sparse_moe.experts.{}.w2",
    ),
    reward_architecture="MixtralForSequenceClassification",
)
_QWEN3_MOE = ModelType(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    sizes=(151936, 32768, 2048, 24, 32, 6144),
    key_value_heads=4,
    windows=WindowKeys(4096, has_use_flag=True),
    mixture=MixtureFiles(
        sizes={
            "count": ("num_experts", 128),
            "per_token": ("num_experts_per_tok", 8),
            "mlp": ("moe_intermediate_size", 768),
            "every": ("decoder_sparse_step", 1),
        },
        normalizes=False,
    ),
    constant_fields={"query_key_norm": "head"},
    reward_architecture="Qwen3MoeForSequenceClassification",
)
_OLMOE = ModelType(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    sizes=(50304, 4096, 2048, 16, 16, 2048),
    epsilon=("rms_norm_eps", 1e-5),
    required_values={"clip_qkv": (None, None), "sliding_window": (None, None)},
    mixture=MixtureFiles(
        sizes={"count": ("num_experts", 64), "per_token": ("num_experts_per_tok", 8)},
        normalizes=False,
    ),
    constant_fields={"query_key_norm": "all"},
)
_DOTS1 = ModelType(
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    sizes=(152064, 2048, 4608, 62, 32, 10944),
    key_value_heads=32,
    windows=WindowKeys(4096, has_layer_types=True, first_full=62),
    mixture=deepseek_mixture(
        *(1, 0, 1408, 0, 0, 1, 1),
        normalizes=False,
        scale=1.0,
        constants={"router": "sigmoid", "balance": "bias"},
    ),
    constant_fields={"query_key_norm": "head"},
)

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
            "count": ("num_experts", 60),
            "per_token": ("num_experts_per_tok", 4),
            "mlp": ("moe_intermediate_size", 1408),
            "every": ("decoder_sparse_step", 1),
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
        normalizes=False,
        shared_width=("shared_expert_intermediate_size", 5632),
        constants={"shared_gate": True},
    ),
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        defaults=FamilyDefaults(),
        model_types=(
            *(_LLAMA, _ARCEE, _MISTRAL, _MINISTRAL, _QWEN2, _QWEN3),
            *(_MIXTRAL, _QWEN3_MOE, _OLMOE, _DOTS1, _QWEN2_MOE),
        ),
        presets=LLAMA_PRESETS,
    ),
}
"""Families of this module by the value of model.family."""
