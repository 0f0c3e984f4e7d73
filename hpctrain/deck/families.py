"""Families of transformers. To add a family, add an entry to `FAMILIES`.

All families are one transformer, described by the keys that `FamilyDefaults` lists. A family is a
named combination of these keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from math import log, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, MixtureFiles, ModelType, WindowKeys

_GEMMA = ModelType(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    sizes=(256000, 8192, 3072, 28, 16, 24576),
    key_value_heads=16,
    head_size=256,
    tied=True,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    required_values={"use_bidirectional_attention": (None, None), "hidden_activation": (None, None)},
    reward_architecture="GemmaForSequenceClassification",
)
_GEMMA2 = ModelType(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    sizes=(256000, 8192, 2304, 26, 8, 9216),
    key_value_heads=4,
    head_size=256,
    tied=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    layers=(
        ("model.layers.{}.post_attention_layernorm", "blocks.{}.attention_output_norm"),
        ("model.layers.{}.pre_feedforward_layernorm", "blocks.{}.feed_forward_norm"),
        ("model.layers.{}.post_feedforward_layernorm", "blocks.{}.feed_forward_output_norm"),
    ),
    keys=(
        ConfigKey("query_pre_attn_scalar", "attention_scale", 256, "inverse_root"),
        ConfigKey("final_logit_softcapping", "logit_cap", 30.0, "cap"),
        ConfigKey("attn_logit_softcapping", "attention_cap", 50.0, "cap"),
    ),
    required_values={"use_bidirectional_attention": (None, None)},
    windows=WindowKeys(4096, has_layer_types=True, full_every=2),
    reward_architecture="Gemma2ForSequenceClassification",
)
_GEMMA3 = replace(
    _GEMMA2,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    sizes=(262208, 131072, 2304, 26, 8, 9216),
    rope_base=1_000_000.0,
    keys=(_GEMMA2.keys[0], replace(_GEMMA2.keys[1], default=None)),
    # transformers ignores attn_logit_softcapping.
    required_values={"use_bidirectional_attention": (False, False), "attn_logit_softcapping": (None, None)},
    windows=WindowKeys(4096, has_layer_types=True, full_every=6, pattern_key="sliding_window_pattern"),
    local_rope=True,
    rope_local_base=10_000.0,
    reward_architecture="Gemma3TextForSequenceClassification",
)
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
_GRANITE = ModelType(
    architecture="GraniteForCausalLM",
    model_type="granite",
    sizes=(32000, 2048, 4096, 32, 32, 11008),
    keys=(
        ConfigKey("embedding_multiplier", "embedding_multiplier", 1.0),
        ConfigKey("residual_multiplier", "residual_multiplier", 1.0),
        ConfigKey("attention_multiplier", "attention_scale", 1.0),
        ConfigKey("logits_scaling", "logit_multiplier", 1.0, "reciprocal"),
        ConfigKey("mlp_bias", "mlp_bias", False),
    ),
)
_GRANITE_MOE = replace(
    _GRANITE,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    keys=tuple(key for key in _GRANITE.keys if key.name != "mlp_bias"),
    mixture=MixtureFiles(
        sizes={"experts": ("num_local_experts", 8), "experts_per_token": ("num_experts_per_tok", 2)},
        layers=(("model.layers.{}.block_sparse_moe.router.layer", "blocks.{}.feed_forward.router"),),
        gate_up=("model.layers.{}.block_sparse_moe.input_linear",),
        down="model.layers.{}.block_sparse_moe.output_linear",
        gates="concatenated",
    ),
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
        sizes={"experts": ("num_local_experts", 128), "experts_per_token": ("num_experts_per_tok", 4)},
        layers=(("model.layers.{}.mlp.router", "blocks.{}.feed_forward.router"),),
        gate_up=("model.layers.{}.mlp.experts.gate_up_proj",),
        down="model.layers.{}.mlp.experts.down_proj",
        gates="interleaved",
        transposed=True,
        suffixes={"weight": "", "bias": "_bias"},
    ),
    quantization="mxfp4",
)
_NEOX = ModelType(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    sizes=(50432, 2048, 6144, 44, 64, 24576),
    epsilon=("layer_norm_eps", 1e-5),
    activation=("hidden_act", "gelu"),
    layers=(
        ("gpt_neox.embed_in", "embedding.tokens"),
        ("gpt_neox.layers.{}.input_layernorm", "blocks.{}.attention_norm"),
        (
            "gpt_neox.layers.{}.attention.query_key_value",
            *(f"blocks.{{}}.attention.{name}" for name in ("query", "key", "value")),
        ),
        ("gpt_neox.layers.{}.attention.dense", "blocks.{}.attention.output"),
        ("gpt_neox.layers.{}.post_attention_layernorm", "blocks.{}.feed_forward_norm"),
        ("gpt_neox.layers.{}.mlp.dense_h_to_4h", "blocks.{}.feed_forward.up"),
        ("gpt_neox.layers.{}.mlp.dense_4h_to_h", "blocks.{}.feed_forward.down"),
        ("gpt_neox.final_layer_norm", "final_norm"),
        ("embed_out", "head"),
    ),
    keys=(
        ConfigKey(
            "use_parallel_residual", "parallel_residual", True, choices=((True, "two_norms"), (False, "none"))
        ),
        ConfigKey("attention_bias", "attention_bias", True, choices=((True, "all"), (False, "none"))),
    ),
    prefix="gpt_neox.",
    buffers=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    grouped=False,
    fused_qkv=True,
    reward_architecture="GPTNeoXForSequenceClassification",
)
_STABLELM = ModelType(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    sizes=(50304, 4096, 2560, 32, 32, 6912),
    epsilon=("layer_norm_eps", 1e-5),
    keys=(
        ConfigKey(
            "use_parallel_residual", "parallel_residual", False, choices=((True, "one_norm"), (False, "none"))
        ),
        ConfigKey(
            "use_qkv_bias", "attention_bias", False, choices=((True, "query_key_value"), (False, "none"))
        ),
        ConfigKey(
            "qk_layernorm", "query_key_norm", False, choices=((True, "layer_per_head"), (False, "none"))
        ),
    ),
    attention_biases=("none", "query_key_value"),
    head_norms=tuple(f"model.layers.{{}}.self_attn.{kind}_layernorm.norms.{{}}" for kind in "qk"),
    reward_architecture="StableLmForSequenceClassification",
)
_STARCODER2 = ModelType(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    sizes=(49152, 4096, 3072, 30, 24, 12288),
    key_value_heads=2,
    epsilon=("norm_epsilon", 1e-5),
    tied=True,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    layers=(
        ("model.layers.{}.mlp.c_fc", "blocks.{}.feed_forward.up"),
        ("model.layers.{}.mlp.c_proj", "blocks.{}.feed_forward.down"),
    ),
    keys=(
        ConfigKey("use_bias", "attention_bias", True, choices=((True, "all"), (False, "none"))),
        ConfigKey("use_bias", "mlp_bias", True),
    ),
    windows=WindowKeys(None),
    reward_architecture="Starcoder2ForSequenceClassification",
)
_COHERE = ModelType(
    architecture="CohereForCausalLM",
    model_type="cohere",
    sizes=(256000, 8192, 8192, 40, 64, 22528),
    epsilon=("layer_norm_eps", 1e-5),
    tied=True,
    rope_base=500_000.0,
    head_norms=tuple(f"model.layers.{{}}.self_attn.{kind}_norm" for kind in "qk"),
    keys=(
        ConfigKey("logit_scale", "logit_multiplier", 0.0625),
        ConfigKey(
            "use_qk_norm", "query_key_norm", False, choices=((True, "layer_per_head"), (False, "none"))
        ),
    ),
    interleaved=True,
)
_COHERE2 = replace(
    _COHERE,
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    rope_base=10_000.0,
    head_norms=(),
    keys=(ConfigKey("logit_scale", "logit_multiplier", 0.0625),),
    windows=WindowKeys(
        4096, has_layer_types=True, full_every=4, pattern_key="sliding_window_pattern", rotate=True
    ),
)
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
    constants={"pad_token_id": None},  # the default of transformers is beyond a smaller vocabulary
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
    interleaved=True,
)

_LATENT = {
    "key_value_rank": ("kv_lora_rank", 512),
    "query_rank": ("q_lora_rank", 1536),
    "rotary_size": ("qk_rope_head_dim", 64),
    "value_size": ("v_head_dim", 128),
    "plain_size": ("qk_nope_head_dim", 128),
}
_GATE_UP_DOWN = ("gate", "up", "down")


def _deepseek_mixture(*defaults: int, **further: Any) -> MixtureFiles:
    """Return the mixtures in files of DeepSeek, with the defaults of their sizes."""
    names = {
        "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_mlp": "moe_intermediate_size",
        "shared_experts": "n_shared_experts",
        "dense_first": "first_k_dense_replace",
        "router_groups": "n_group",
        "router_groups_per_token": "topk_group",
    }
    module, own = "model.layers.{}.mlp", "blocks.{}.feed_forward"
    return MixtureFiles(
        sizes=dict(zip(names, zip(names.values(), defaults, strict=True), strict=True)),
        layers=(
            (f"{module}.gate", f"{own}.router"),
            (f"{module}.gate.e_score_correction_bias", f"router/bias/{own}.router"),
            *((f"{module}.shared_experts.{name}_proj", f"{own}.shared.{name}") for name in _GATE_UP_DOWN),
        ),
        gate_up=tuple(f"{module}.experts.{{}}.{name}_proj" for name in ("gate", "up")),
        down=f"{module}.experts.{{}}.down_proj",
        **further,
    )


_DEEPSEEK_FIXED = {"attention_bias": (False, False), "moe_layer_freq": (1, 1)}
_DEEPSEEK_V2_REPORT = "DeepSeek-V2: DeepSeek-AI 2024, arXiv 2405.04434"
_DEEPSEEK_V2 = ModelType(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    sizes=(102400, 2048, 4096, 32, 32, 11008),
    required_values={
        **_DEEPSEEK_FIXED,
        "mlp_bias": (False, False),
        "norm_topk_prob": (False, False),
        "scoring_func": ("softmax", "softmax"),
    },
    attention_biases=("none",),
    latent=_LATENT,
    mixture=_deepseek_mixture(
        *(64, 6, 1407, 2, 0, 1, 1),
        scale=1.0,
        group_method=("topk_method", "greedy", "group_limited_greedy"),
    ),
    interleaved=True,
    reward_architecture="DeepseekV2ForSequenceClassification",
)
_DEEPSEEK_V3 = ModelType(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    sizes=(129280, 4096, 7168, 61, 128, 18432),
    required_values={
        **_DEEPSEEK_FIXED,
        "rope_interleave": (True, True),
        "scoring_func": ("sigmoid", "sigmoid"),
        "topk_method": ("noaux_tc", "noaux_tc"),
    },
    attention_biases=("none",),
    latent=_LATENT,
    mixture=_deepseek_mixture(*(256, 8, 2048, 1, 3, 8, 4), normalizes=True, scale=2.5),
    buffers=r"(model\.)?layers\.(\d+\.self_attn\.rotary_emb\.inv_freq|61\..*)",
    constants={"num_nextn_predict_layers": 0},
    interleaved=True,
    reward_architecture="DeepseekV3ForSequenceClassification",
)


def _model(
    layers: int,
    hidden: int,
    heads: int,
    key_value_heads: int,
    mlp: int,
    vocabulary: int,
    norm_epsilon: float,
    **further: Any,
) -> dict[str, Any]:
    """Return the keys of [model] of a preset."""
    own = {"layers": layers, "hidden": hidden, "heads": heads, "key_value_heads": key_value_heads}
    return {**own, "mlp": mlp, "vocabulary": vocabulary, "norm_epsilon": norm_epsilon, **further}


def _experts(count: int, per_token: int, mlp: int, router_normalize: bool, **further: Any) -> dict[str, Any]:
    """Return the keys of [model.experts] of a preset."""
    sizes = {"count": count, "per_token": per_token, "mlp": mlp}
    return {**sizes, "router_normalize": router_normalize, **further}


_QWEN2_BIASES = {"attention_bias": "query_key_value"}
"""Biases of the attention of Qwen2 and Qwen2-MoE."""


def _granite(attention_scale: float, logit_multiplier: float) -> dict[str, float]:
    """Return the multipliers of a Granite model."""
    usual = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    return {**usual, "attention_scale": attention_scale, "logit_multiplier": logit_multiplier}


def _latent(query_rank: int | None) -> dict[str, int]:
    """Return the keys of [model.latent] of a DeepSeek model, of which only this one differs."""
    sizes = {"key_value_rank": 512, "rotary_size": 64, "value_size": 128}
    return sizes if query_rank is None else {**sizes, "query_rank": query_rank}


def _deepseek_experts(
    count: int, per_token: int, mlp: int, shared: int, dense_first: int, scale: float, **further: Any
) -> dict[str, Any]:
    """Return the keys of [model.experts] of a DeepSeek model."""
    sizes = {"count": count, "per_token": per_token, "mlp": mlp, "shared": shared}
    return {**sizes, "dense_first": dense_first, "router_scale": scale, **further}


def _deepseek_scale(mscale: float) -> float:
    """Return the attention scale of a DeepSeek model whose files say `mscale_all_dim`."""
    by_yarn = 0.1 * mscale * log(_DEEPSEEK_FACTOR) + 1
    return float(192**-0.5 * by_yarn * by_yarn)


_DEEPSEEK_FACTOR = 40.0
_DEEPSEEK_YARN = {
    "kind": "yarn",
    "factor": _DEEPSEEK_FACTOR,
    "original_sequence": 4096,
    "attention_factor": 1.0,
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": Family(
            defaults=FamilyDefaults(
                positions="learned",
                norm="layer",
                norm_bias=True,
                attention_bias="all",
                mlp_bias=True,
                activation="gelu-tanh",
                tied=True,
            )
        ),
        "llama": Family(
            defaults=FamilyDefaults(),
            model_types=(_QWEN2_MOE,),
            presets={
                "mixtral-8x22b": {
                    "source": "Mixtral 8x22B: Mistral AI 2024, huggingface.co/mistralai",
                    "sequence": 65536,
                    "model": _model(56, 6144, 48, 8, 16384, 32000, 1e-5, rope_base=1e6),
                    "experts": _experts(8, 2, 16384, True),
                },
                "qwen1.5-moe-a2.7b": {
                    "source": "Qwen1.5-MoE: Qwen Team 2024, qwenlm.github.io/blog/qwen-moe",
                    "sequence": 8192,
                    "model": _model(24, 2048, 16, 16, 5632, 151936, 1e-6, rope_base=1e6, **_QWEN2_BIASES),
                    "experts": _experts(60, 4, 1408, False, shared=4, shared_gate=True),
                },
                "qwen2-57b-a14b": {
                    "source": "Qwen2: Yang et al. 2024, arXiv 2407.10671",
                    "sequence": 32768,
                    "model": _model(28, 3584, 28, 4, 18944, 151936, 1e-6, rope_base=1e6, **_QWEN2_BIASES),
                    "experts": _experts(64, 8, 2560, False, shared=8, shared_gate=True),
                },
                "qwen3-235b-a22b": {
                    "source": "Qwen3: Yang et al. 2025, arXiv 2505.09388",
                    "sequence": 32768,
                    "model": _model(
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
                    "experts": _experts(128, 8, 1536, True),
                },
            },
        ),
        "gemma": Family(
            defaults=FamilyDefaults(
                norm_weight="one_plus", activation="geglu", scaled_embedding=True, tied=True
            ),
            model_types=(_GEMMA,),
            presets={
                "gemma-2b": {
                    "source": "Gemma: Gemma Team 2024, arXiv 2403.08295",
                    "sequence": 8192,
                    "model": _model(18, 2048, 8, 1, 16384, 256000, 1e-6, head_size=256),
                },
                "gemma-7b": {
                    "source": "Gemma: Gemma Team 2024, arXiv 2403.08295",
                    "sequence": 8192,
                    "model": _model(28, 3072, 16, 16, 24576, 256000, 1e-6, head_size=256),
                },
            },
        ),
        "gemma2": Family(
            defaults=FamilyDefaults(
                norm_weight="one_plus",
                norm_placement="both",
                activation="geglu",
                windows=(4096, 0),
                attention_cap=50.0,
                logit_cap=30.0,
                scaled_embedding=True,
                tied=True,
            ),
            model_types=(_GEMMA2,),
            presets={
                f"gemma2-{name}": {
                    "source": "Gemma 2: Gemma Team 2024, arXiv 2408.00118",
                    "sequence": 8192,
                    "model": _model(*sizes, 256000, 1e-6, head_size=head, attention_scale=scalar**-0.5),
                }
                for name, sizes, head, scalar in (
                    ("2b", (26, 2304, 8, 4, 9216), 256, 256),
                    ("9b", (42, 3584, 16, 8, 14336), 256, 256),
                    ("27b", (46, 4608, 32, 16, 36864), 128, 144),
                )
            },
        ),
        "gemma3": Family(
            defaults=FamilyDefaults(
                norm_weight="one_plus",
                norm_placement="both",
                query_key_norm="head",
                activation="geglu",
                windows=(1024, 1024, 1024, 1024, 1024, 0),
                scaled_embedding=True,
                tied=True,
            ),
            model_types=(_GEMMA3,),
            presets={
                f"gemma3-{name}": {
                    "source": "Gemma 3: Gemma Team 2025, arXiv 2503.19786",
                    "sequence": 32768,
                    "model": _model(
                        *sizes,
                        vocabulary,
                        1e-6,
                        head_size=head,
                        attention_scale=scalar**-0.5,
                        windows=(window,) * 5 + (0,),
                        rope_base=1e6,
                        rope_local_base=1e4,
                    ),
                }
                for name, sizes, vocabulary, head, scalar, window in (
                    ("270m", (18, 640, 4, 1, 2048), 262144, 256, 256, 512),
                    ("1b", (26, 1152, 4, 1, 6912), 262144, 256, 256, 512),
                    ("4b", (34, 2560, 8, 4, 10240), 262208, 256, 256, 1024),
                    ("12b", (48, 3840, 16, 8, 15360), 262208, 256, 256, 1024),
                    ("27b", (62, 5376, 32, 16, 21504), 262208, 128, 168, 1024),
                )
            },
        ),
        "olmo": Family(
            defaults=FamilyDefaults(norm="layer", norm_weight="none"),
            model_types=(_OLMO,),
            presets={
                "olmo-1b": {
                    "source": "OLMo: Groeneveld et al. 2024, arXiv 2402.00838",
                    "sequence": 2048,
                    "model": _model(16, 2048, 16, 16, 8192, 50304, 1e-5, tied=True),
                },
                "olmo-7b": {
                    "source": "OLMo: Groeneveld et al. 2024, arXiv 2402.00838",
                    "sequence": 2048,
                    "model": _model(32, 4096, 32, 32, 11008, 50304, 1e-5),
                },
                "olmo-7b-0424": {
                    "source": "OLMo 1.7: Groeneveld et al. 2024, huggingface.co/allenai",
                    "sequence": 4096,
                    "model": _model(32, 4096, 32, 32, 11008, 50304, 1e-5, query_key_value_clip=8.0),
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
                    "model": _model(*sizes, 100352, 1e-6, rope_base=5e5),
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
            defaults=FamilyDefaults(
                norm_placement="after", query_key_norm="all", windows=(4096, 4096, 4096, 0)
            ),
            model_types=(_OLMO3,),
            presets={
                f"olmo3-{name}": {
                    "source": "OLMo 3: Team Olmo 2025, huggingface.co/allenai",
                    "sequence": 8192,
                    "model": _model(*sizes, 100278, 1e-6, rope_base=5e5),
                }
                for name, sizes in {
                    "7b": (32, 4096, 32, 32, 11008),
                    "32b": (64, 5120, 40, 8, 27648),
                }.items()
            },
        ),
        "granite": Family(
            defaults=FamilyDefaults(),
            model_types=(_GRANITE, _GRANITE_MOE),
            presets={
                "granite-3-2b": {
                    "source": "Granite 3.0: IBM 2024, huggingface.co/ibm-granite",
                    "sequence": 4096,
                    "model": _model(40, 2048, 32, 8, 8192, 49155, 1e-5, tied=True, **_granite(1 / 64, 1 / 8)),
                },
                "granite-3-1b-a400m": {
                    "source": "Granite 3.0: IBM 2024, huggingface.co/ibm-granite",
                    "sequence": 4096,
                    "model": _model(24, 1024, 16, 8, 512, 49155, 1e-6, tied=True, **_granite(1 / 64, 1 / 6)),
                    "experts": _experts(32, 8, 512, True),
                },
                "granite-3-3b-a800m": {
                    "source": "Granite 3.0: IBM 2024, huggingface.co/ibm-granite",
                    "sequence": 4096,
                    "model": _model(32, 1536, 24, 8, 512, 49155, 1e-6, tied=True, **_granite(1 / 64, 1 / 6)),
                    "experts": _experts(40, 8, 512, True),
                },
                "granite-3-8b": {
                    "source": "Granite 3.0: IBM 2024, huggingface.co/ibm-granite",
                    "sequence": 4096,
                    "model": _model(
                        40, 4096, 32, 8, 12800, 49155, 1e-5, tied=True, **_granite(1 / 128, 1 / 16)
                    ),
                },
            },
        ),
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
                    "model": _model(
                        layers, 2880, 64, 8, 2880, 201088, 1e-5, head_size=64, rope_base=150_000.0
                    ),
                    "experts": _experts(count, 4, 2880, True),
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
        "neox": Family(
            defaults=FamilyDefaults(
                rotary_fraction=0.25,
                norm="layer",
                norm_bias=True,
                parallel_residual="two_norms",
                attention_bias="all",
                mlp_bias=True,
                activation="gelu",
            ),
            model_types=(_NEOX,),
            presets={
                name: {
                    "source": "Pythia: Biderman et al. 2023, arXiv 2304.01373",
                    "sequence": 2048,
                    "model": _model(layers, hidden, heads, heads, 4 * hidden, vocabulary, 1e-5),
                }
                for name, (layers, hidden, heads, vocabulary) in {
                    "pythia-70m": (6, 512, 8, 50304),
                    "pythia-160m": (12, 768, 12, 50304),
                    "pythia-410m": (24, 1024, 16, 50304),
                    "pythia-1b": (16, 2048, 8, 50304),
                    "pythia-1.4b": (24, 2048, 16, 50304),
                    "pythia-2.8b": (32, 2560, 32, 50304),
                    "pythia-6.9b": (32, 4096, 32, 50432),
                    "pythia-12b": (36, 5120, 40, 50688),
                    "gpt-neox-20b": (44, 6144, 64, 50432),
                }.items()
            },
        ),
        "stablelm": Family(
            defaults=FamilyDefaults(rotary_fraction=0.25, norm="layer", norm_bias=True),
            model_types=(_STABLELM,),
            presets={
                "stablelm-3b": {
                    "source": "StableLM 3B 4E1T: Tow et al. 2023, huggingface.co/stabilityai",
                    "sequence": 4096,
                    "model": _model(32, 2560, 32, 32, 6912, 50304, 1e-5),
                },
                "stablelm-2-1.6b": {
                    "source": "Stable LM 2: Bellagente et al. 2024, arXiv 2402.17834",
                    "sequence": 4096,
                    "model": _model(24, 2048, 32, 32, 5632, 100352, 1e-5, attention_bias="query_key_value"),
                },
                "stablelm-2-12b": {
                    "source": "Stable LM 2 12B: Stability AI 2024, huggingface.co/stabilityai",
                    "sequence": 4096,
                    "model": _model(
                        *(40, 5120, 32, 8, 13824, 100352, 1e-5),
                        query_key_norm="layer_per_head",
                        parallel_residual="one_norm",
                    ),
                },
            },
        ),
        "starcoder2": Family(
            defaults=FamilyDefaults(
                norm="layer",
                norm_bias=True,
                attention_bias="all",
                mlp_bias=True,
                activation="gelu-tanh",
                tied=True,
            ),
            model_types=(_STARCODER2,),
            presets={
                f"starcoder2-{name}": {
                    "source": "StarCoder 2: Lozhkov et al. 2024, arXiv 2402.19173",
                    "sequence": 16384,
                    "model": _model(*sizes, 49152, 1e-5, rope_base=base, windows=(4096,), tied=name != "15b"),
                }
                for name, sizes, base in (
                    ("3b", (30, 3072, 24, 2, 12288), 1e6),
                    ("7b", (32, 4608, 36, 4, 18432), 1e6),
                    ("15b", (40, 6144, 48, 4, 24576), 1e5),
                )
            },
        ),
        "cohere": Family(
            defaults=FamilyDefaults(
                norm="layer", parallel_residual="one_norm", logit_multiplier=0.0625, tied=True
            ),
            model_types=(_COHERE,),
            presets={
                "command-r-35b": {
                    "source": "Command R: Cohere 2024, huggingface.co/CohereForAI",
                    "sequence": 8192,
                    "model": _model(40, 8192, 64, 64, 22528, 256000, 1e-5, rope_base=8e6),
                },
                "command-r-plus-104b": {
                    "source": "Command R+: Cohere 2024, huggingface.co/CohereForAI",
                    "sequence": 8192,
                    "model": _model(
                        *(64, 12288, 96, 8, 33792, 256000, 1e-5),
                        rope_base=7.5e7,
                        logit_multiplier=5 / 6,
                        query_key_norm="layer_per_head",
                    ),
                },
            },
        ),
        "cohere2": Family(
            defaults=FamilyDefaults(
                norm="layer",
                parallel_residual="one_norm",
                logit_multiplier=0.0625,
                rotation_pattern=(True, True, True, False),
                windows=(4096, 4096, 4096, 0),
                tied=True,
            ),
            model_types=(_COHERE2,),
            presets={
                "command-r7b": {
                    "source": "Command R7B: Cohere 2024, huggingface.co/CohereForAI",
                    "sequence": 8192,
                    "model": _model(
                        *(32, 4096, 32, 8, 14336, 256000, 1e-5), rope_base=5e4, logit_multiplier=0.25
                    ),
                },
            },
        ),
        "glm": Family(
            defaults=FamilyDefaults(rotary_fraction=0.5, attention_bias="query_key_value"),
            model_types=(_GLM,),
            presets={
                "glm-4-9b": {
                    "source": "GLM-4: Team GLM 2024, arXiv 2406.12793",
                    "sequence": 8192,
                    "model": _model(40, 4096, 32, 2, 13696, 151552, 1.5625e-7, head_size=128),
                },
            },
        ),
        "glm4": Family(
            defaults=FamilyDefaults(
                rotary_fraction=0.5, attention_bias="query_key_value", norm_placement="both"
            ),
            model_types=(_GLM4,),
        ),
        "phi3": Family(
            defaults=FamilyDefaults(),
            model_types=(_PHI3,),
            presets={
                "phi-3-mini": {
                    "source": "Phi-3: Abdin et al. 2024, arXiv 2404.14219",
                    "sequence": 4096,
                    "model": _model(32, 3072, 32, 32, 8192, 32064, 1e-5, windows=(2047,)),
                },
                "phi-3-medium": {
                    "source": "Phi-3: Abdin et al. 2024, arXiv 2404.14219",
                    "sequence": 4096,
                    "model": _model(40, 5120, 40, 10, 17920, 32064, 1e-5),
                },
                "phi-4": {
                    "source": "Phi-4: Abdin et al. 2024, arXiv 2412.08905",
                    "sequence": 16384,
                    "model": _model(40, 5120, 40, 10, 17920, 100352, 1e-5, rope_base=250000.0),
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
                    "model": _model(36, 2048, 16, 4, 11008, 128256, 1e-6, rope_base=5e6),
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
                    "model": _model(18, 1024, 16, 2, 3072, 103424, 1e-5, head_size=128, rope_base=5e5),
                },
            },
        ),
        "deepseek-v2": Family(
            defaults=FamilyDefaults(),
            experts={"router_normalize": False, "router_group_best": 1},
            model_types=(_DEEPSEEK_V2,),
            presets={
                "deepseek-v2-lite": {
                    "source": _DEEPSEEK_V2_REPORT,
                    "sequence": 4096,
                    "model": _model(
                        *(27, 2048, 16, 16, 10944, 102400, 1e-6),
                        head_size=192,
                        attention_scale=_deepseek_scale(0.707),
                    ),
                    "latent": _latent(None),
                    "experts": _deepseek_experts(64, 6, 1408, 2, 1, 1.0),
                    "rope_scaling": _DEEPSEEK_YARN,
                },
                "deepseek-v2-236b": {
                    "source": _DEEPSEEK_V2_REPORT,
                    "sequence": 4096,
                    "model": _model(
                        *(60, 5120, 128, 128, 12288, 102400, 1e-6),
                        head_size=192,
                        attention_scale=_deepseek_scale(0.707),
                    ),
                    "latent": _latent(1536),
                    "experts": _deepseek_experts(
                        *(160, 6, 1536, 2, 1, 16.0),
                        router_groups=8,
                        router_groups_per_token=3,
                    ),
                    "rope_scaling": _DEEPSEEK_YARN,
                },
            },
        ),
        "deepseek-v3": Family(
            defaults=FamilyDefaults(),
            experts={"router": "sigmoid", "balance": "bias"},
            model_types=(_DEEPSEEK_V3,),
            presets={
                "deepseek-v3-671b": {
                    "source": "DeepSeek-V3: DeepSeek-AI 2024, arXiv 2412.19437",
                    "sequence": 4096,
                    "model": _model(
                        *(61, 7168, 128, 128, 18432, 129280, 1e-6),
                        head_size=192,
                        attention_scale=_deepseek_scale(1.0),
                    ),
                    "latent": _latent(1536),
                    "experts": _deepseek_experts(
                        *(256, 8, 2048, 1, 3, 2.5),
                        router_groups=8,
                        router_groups_per_token=4,
                    ),
                    "rope_scaling": _DEEPSEEK_YARN,
                },
                "moonlight-16b-a3b": {
                    "source": "Moonlight: Liu et al. 2025, arXiv 2502.16982",
                    "sequence": 8192,
                    "model": _model(
                        *(27, 2048, 16, 16, 11264, 163840, 1e-5), head_size=192, rope_base=50000.0
                    ),
                    "latent": _latent(None),
                    "experts": _deepseek_experts(64, 6, 1408, 2, 1, 2.446),
                },
            },
        ),
    }
)
"""Families by the value of model.family."""

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]

CHOICES = tuple(
    field.name for field in fields(FamilyDefaults) if field.name not in {"scaled_embedding", "tied"}
)
"""Keys of [model] whose default a family decides, besides `tied` and `embedding_multiplier`."""


def family_values(family: str, hidden: int) -> dict[str, Any]:
    """Return the defaults of keys of [model] in a family, by name.

    Args:
        family: Value of model.family.
        hidden: Value of model.hidden.
    """
    defaults = FAMILIES[family].defaults
    values = {name: getattr(defaults, name) for name in (*CHOICES, "tied")}
    return {**values, "embedding_multiplier": sqrt(hidden) if defaults.scaled_embedding else 1.0}


def described_defaults(name: str) -> str:
    """Return the default of a key in words for the reference: the usual value, and families with others."""
    by_value: dict[Any, list[str]] = {}
    for name_of_family, family in FAMILIES.items():
        by_value.setdefault(getattr(family.defaults, name), []).append(name_of_family)
    usual = max(by_value, key=lambda value: len(by_value[value]))
    others = [
        f"{_default_text(value)} ({', '.join(names)})" for value, names in by_value.items() if value != usual
    ]
    return "; ".join((_default_text(usual), *others))


def _default_text(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
