"""DeepSeek-V2 and V3, and Moonlight."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

from hpctrain.deck.families.preset_keys import model_keys
from hpctrain.deck.family import Family, FamilyDefaults, MixtureFiles, ModelType

_LATENT = {
    "key_value_rank": ("kv_lora_rank", 512),
    "query_rank": ("q_lora_rank", 1536),
    "rotary_size": ("qk_rope_head_dim", 64),
    "value_size": ("v_head_dim", 128),
    "plain_size": ("qk_nope_head_dim", 128),
}
_GATE_UP_DOWN = ("gate", "up", "down")


def deepseek_mixture(*defaults: int, **further: Any) -> MixtureFiles:
    """Return the mixtures in files of DeepSeek, and of models with the same names.

    Args:
        defaults: Default of each size, in the order of `names`; 0 experts per token for no default.
        further: Further fields of the result.
    """
    names = {
        "count": "n_routed_experts",
        "per_token": "num_experts_per_tok",
        "mlp": "moe_intermediate_size",
        "shared": "n_shared_experts",
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
    heads_divide_hidden=True,
    latent=_LATENT,
    mixture=deepseek_mixture(
        *(64, 0, 1407, 2, 0, 1, 1),
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
    mixture=deepseek_mixture(*(256, 8, 2048, 1, 3, 8, 4), normalizes=True, scale=2.5),
    buffers=r"(model\.)?layers\.(\d+\.self_attn\.rotary_emb\.inv_freq|61\..*)",
    constants={"num_nextn_predict_layers": 0},
    interleaved=True,
    reward_architecture="DeepseekV3ForSequenceClassification",
)


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

FAMILIES: Mapping[str, Family] = {
    "deepseek-v2": Family(
        defaults=FamilyDefaults(),
        experts={"router_normalize": False, "router_group_best": 1},
        model_types=(_DEEPSEEK_V2,),
        presets={
            "deepseek-v2-lite": {
                "source": _DEEPSEEK_V2_REPORT,
                "sequence": 4096,
                "model": model_keys(
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
                "model": model_keys(
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
                "model": model_keys(
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
                "model": model_keys(
                    *(27, 2048, 16, 16, 11264, 163840, 1e-5), head_size=192, rope_base=50000.0
                ),
                "latent": _latent(None),
                "experts": _deepseek_experts(64, 6, 1408, 2, 1, 2.446),
            },
        },
    ),
}
"""Families of this module by the value of model.family."""
