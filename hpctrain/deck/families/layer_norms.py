"""Families with rotary positions and LayerNorm: GPT-NeoX and Pythia, StableLM, StarCoder 2."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.deck.families.preset_keys import model_keys
from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, ModelType, WindowKeys

_NEOX = ModelType(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    sizes=(50432, 2048, 6144, 44, 64, 24576),
    epsilon=("layer_norm_eps", 1e-5),
    rope_keys=("rotary_emb_base", "rotary_pct"),
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
    dropouts={"hidden_dropout": 0.0},
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
    has_head_size=False,
    has_rotary_fraction=True,
    head_norms=tuple(f"model.layers.{{}}.self_attn.{kind}_layernorm.norms.{{}}" for kind in "qk"),
    dropouts={"hidden_dropout": 0.0},
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
    dropouts={"embedding_dropout": 0.0, "residual_dropout": 0.0},
    windows=WindowKeys(None),
    reward_architecture="Starcoder2ForSequenceClassification",
)

FAMILIES: Mapping[str, Family] = {
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
                "model": model_keys(layers, hidden, heads, heads, 4 * hidden, vocabulary, 1e-5),
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
            }.items()
        }
        | {
            "gpt-neox-20b": {
                "source": "GPT-NeoX-20B: Black et al. 2022, arXiv 2204.06745",
                "sequence": 2048,
                "model": model_keys(44, 6144, 64, 64, 24576, 50432, 1e-5, activation="gelu-tanh"),
            },
        },
    ),
    "stablelm": Family(
        defaults=FamilyDefaults(rotary_fraction=0.25, norm="layer", norm_bias=True),
        model_types=(_STABLELM,),
        presets={
            "stablelm-3b": {
                "source": "StableLM 3B 4E1T: Tow et al. 2023, huggingface.co/stabilityai",
                "sequence": 4096,
                "model": model_keys(32, 2560, 32, 32, 6912, 50304, 1e-5),
            },
            "stablelm-2-1.6b": {
                "source": "Stable LM 2: Bellagente et al. 2024, arXiv 2402.17834",
                "sequence": 4096,
                "model": model_keys(24, 2048, 32, 32, 5632, 100352, 1e-5, attention_bias="query_key_value"),
            },
            "stablelm-2-12b": {
                "source": "Stable LM 2 12B: Stability AI 2024, huggingface.co/stabilityai",
                "sequence": 4096,
                "model": model_keys(
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
                "model": model_keys(*sizes, 49152, 1e-5, rope_base=base, windows=(4096,), tied=name != "15b"),
            }
            for name, sizes, base in (
                ("3b", (30, 3072, 24, 2, 12288), 999999.4420358813),
                ("7b", (32, 4608, 36, 4, 18432), 1e6),
                ("15b", (40, 6144, 48, 4, 24576), 1e5),
            )
        },
    ),
}
"""Families of this module by the value of model.family."""
