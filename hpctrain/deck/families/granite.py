"""Granite, dense and with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpctrain.deck.families.preset_keys import expert_keys, model_keys
from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, MixtureFiles, ModelType

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
        sizes={"count": ("num_local_experts", 8), "per_token": ("num_experts_per_tok", 2)},
        layers=(("model.layers.{}.block_sparse_moe.router.layer", "blocks.{}.feed_forward.router"),),
        gate_up=("model.layers.{}.block_sparse_moe.input_linear",),
        down="model.layers.{}.block_sparse_moe.output_linear",
        gates="concatenated",
    ),
)


def _granite(attention_scale: float, logit_multiplier: float) -> dict[str, float]:
    """Return the multipliers of a Granite model."""
    usual = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    return {**usual, "attention_scale": attention_scale, "logit_multiplier": logit_multiplier}


FAMILIES: Mapping[str, Family] = {
    "granite": Family(
        defaults=FamilyDefaults(),
        model_types=(_GRANITE, _GRANITE_MOE),
        presets={
            "granite-3-2b": {
                "source": "Granite 3.0: IBM 2024, huggingface.co/ibm-granite",
                "sequence": 4096,
                "model": model_keys(40, 2048, 32, 8, 8192, 49155, 1e-5, tied=True, **_granite(1 / 64, 1 / 8)),
            },
            "granite-3-1b-a400m": {
                "source": "Granite 3.0: IBM 2024, huggingface.co/ibm-granite",
                "sequence": 4096,
                "model": model_keys(24, 1024, 16, 8, 512, 49155, 1e-6, tied=True, **_granite(1 / 64, 1 / 6)),
                "experts": expert_keys(32, 8, 512, True),
            },
            "granite-3-3b-a800m": {
                "source": "Granite 3.0: IBM 2024, huggingface.co/ibm-granite",
                "sequence": 4096,
                "model": model_keys(32, 1536, 24, 8, 512, 49155, 1e-6, tied=True, **_granite(1 / 64, 1 / 6)),
                "experts": expert_keys(40, 8, 512, True),
            },
            "granite-3-8b": {
                "source": "Granite 3.0: IBM 2024, huggingface.co/ibm-granite",
                "sequence": 4096,
                "model": model_keys(
                    40, 4096, 32, 8, 12800, 49155, 1e-5, tied=True, **_granite(1 / 128, 1 / 16)
                ),
            },
        },
    ),
}
"""Families of this module by the value of model.family."""
