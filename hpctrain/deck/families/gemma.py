"""Gemma, Gemma 2 and Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpctrain.deck.families.preset_keys import model_keys
from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, ModelType, WindowKeys

_GEMMA = ModelType(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    sizes=(256000, 8192, 3072, 28, 16, 24576),
    key_value_heads=16,
    head_size=256,
    tied=True,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    # The first published files say "gelu" for GELU by tanh, with which Gemma was trained.
    activation_aliases={"gelu": "gelu_pytorch_tanh"},
    required_values={"use_bidirectional_attention": (None, None)},
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
    heads_divide_hidden=True,
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

_GEMMA3_SCALING = {"kind": "linear", "factor": 8.0}
"""Scaling of the positions of layers without a window, with which the published models end their training."""

FAMILIES: Mapping[str, Family] = {
    "gemma": Family(
        defaults=FamilyDefaults(norm_weight="one_plus", activation="geglu", scaled_embedding=True, tied=True),
        model_types=(_GEMMA,),
        presets={
            "gemma-2b": {
                "source": "Gemma: Gemma Team 2024, arXiv 2403.08295",
                "sequence": 8192,
                "model": model_keys(18, 2048, 8, 1, 16384, 256000, 1e-6, head_size=256),
            },
            "gemma-7b": {
                "source": "Gemma: Gemma Team 2024, arXiv 2403.08295",
                "sequence": 8192,
                "model": model_keys(28, 3072, 16, 16, 24576, 256000, 1e-6, head_size=256),
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
                "model": model_keys(*sizes, 256000, 1e-6, head_size=head, attention_scale=scalar**-0.5),
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
                "model": model_keys(
                    *sizes,
                    vocabulary,
                    1e-6,
                    head_size=head,
                    attention_scale=scalar**-0.5,
                    windows=(window,) * 5 + (0,),
                    rope_base=1e6,
                    rope_local_base=1e4,
                ),
                "rope_scaling": scaling,
            }
            for name, sizes, vocabulary, head, scalar, window, scaling in (
                ("270m", (18, 640, 4, 1, 2048), 262144, 256, 256, 512, {}),
                ("1b", (26, 1152, 4, 1, 6912), 262144, 256, 256, 512, {}),
                ("4b", (34, 2560, 8, 4, 10240), 262208, 256, 256, 1024, _GEMMA3_SCALING),
                ("12b", (48, 3840, 16, 8, 15360), 262208, 256, 256, 1024, _GEMMA3_SCALING),
                ("27b", (62, 5376, 32, 16, 21504), 262208, 128, 168, 1024, _GEMMA3_SCALING),
            )
        },
    ),
}
"""Families of this module by the value of model.family."""
