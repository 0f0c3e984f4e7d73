"""GPT-2."""

from __future__ import annotations

from collections.abc import Mapping

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
    dropouts=("embd_pdrop", "resid_pdrop"),
    constants={"attn_pdrop": 0.0},
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
    ),
}
"""Families of this module by the value of model.family."""
