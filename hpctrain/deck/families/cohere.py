"""Command R and Command R7B of Cohere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpctrain.deck.families.preset_keys import model_keys
from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, ModelType, WindowKeys

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

FAMILIES: Mapping[str, Family] = {
    "cohere": Family(
        defaults=FamilyDefaults(
            norm="layer", parallel_residual="one_norm", logit_multiplier=0.0625, tied=True
        ),
        model_types=(_COHERE,),
        presets={
            "command-r-35b": {
                "source": "Command R: Cohere 2024, huggingface.co/CohereForAI",
                "sequence": 8192,
                "model": model_keys(40, 8192, 64, 64, 22528, 256000, 1e-5, rope_base=8e6),
            },
            "command-r-plus-104b": {
                "source": "Command R+: Cohere 2024, huggingface.co/CohereForAI",
                "sequence": 8192,
                "model": model_keys(
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
                "model": model_keys(
                    *(32, 4096, 32, 8, 14336, 256000, 1e-5), rope_base=5e4, logit_multiplier=0.25
                ),
            },
        },
    ),
}
"""Families of this module by the value of model.family."""
