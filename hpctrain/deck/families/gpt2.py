"""GPT-2."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.deck.families.preset_keys import model_keys, preset_series
from hpctrain.deck.family import Family, FamilyDefaults, ModelType

_BLOCK = "transformer.h.{}"
_GPT2 = ModelType(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    sizes=(50257, 1024, 768, 12, 12, 0),
    size_keys=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"),
    epsilon=("layer_norm_epsilon", 1e-5),
    tied=True,
    activation=("activation_function", "gelu_new"),
    layers=(
        ("transformer.wte", "embedding.tokens"),
        ("transformer.wpe", "embedding.positions"),
        (f"{_BLOCK}.ln_1", "blocks.{}.attention_norm"),
        (f"{_BLOCK}.attn.c_attn", *(f"blocks.{{}}.attention.{name}" for name in ("query", "key", "value"))),
        (f"{_BLOCK}.attn.c_proj", "blocks.{}.attention.output"),
        (f"{_BLOCK}.ln_2", "blocks.{}.feed_forward_norm"),
        (f"{_BLOCK}.mlp.c_fc", "blocks.{}.feed_forward.up"),
        (f"{_BLOCK}.mlp.c_proj", "blocks.{}.feed_forward.down"),
        ("transformer.ln_f", "final_norm"),
    ),
    transposed=True,
    attention_biases=("all",),
    required_values={
        "scale_attn_weights": (True, True),
        "scale_attn_by_inverse_layer_idx": (False, False),
        "add_cross_attention": (False, False),
    },
    reward_architecture="GPT2ForSequenceClassification",
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    grouped=False,
    dropouts={"embd_pdrop": 0.1, "resid_pdrop": 0.1},
    training_noise={"attn_pdrop": 0.1},
)

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        defaults=FamilyDefaults(
            positions="learned",
            norm="layer",
            norm_bias=True,
            attention_bias="all",
            mlp_bias=True,
            activation="gelu-tanh",
            tied=True,
        ),
        model_types=(_GPT2,),
        presets={
            **preset_series(
                "Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
                1024,
                {
                    "gpt2-124m": model_keys(12, 768, 12, 12, 3072, 50257, 1e-5),
                    "gpt2-355m": model_keys(24, 1024, 16, 16, 4096, 50257, 1e-5),
                    "gpt2-774m": model_keys(36, 1280, 20, 20, 5120, 50257, 1e-5),
                    "gpt2-1.5b": model_keys(48, 1600, 25, 25, 6400, 50257, 1e-5),
                },
            ),
            **preset_series(
                "Narayanan et al. 2021, arXiv 2104.04473, table 1",
                2048,
                {
                    "megatron-1.7b": model_keys(24, 2304, 24, 24, 9216, 51200, 1e-5),
                    "megatron-18.4b": model_keys(40, 6144, 48, 48, 24576, 51200, 1e-5),
                    "megatron-76.1b": model_keys(60, 10240, 80, 80, 40960, 51200, 1e-5),
                    "megatron-310.1b": model_keys(96, 16384, 128, 128, 65536, 51200, 1e-5),
                    "megatron-1008b": model_keys(128, 25600, 160, 160, 102400, 51200, 1e-5),
                },
            ),
        },
    ),
}
"""Families of this module by the value of model.family."""
