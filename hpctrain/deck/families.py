"""Families of transformers. To add a family, add an entry to `FAMILIES`.

All families are one transformer, described by the keys that `FamilyDefaults` lists. A deck may change each of
them; what has a name is a combination that published models have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.deck.family import ConfigKey, Family, FamilyDefaults, ModelType

_GEMMA = ModelType(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    sizes=(256000, 8192, 3072, 28, 16, 24576),
    key_value_heads=16,
    head_size=256,
    tied=True,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    fixed={"use_bidirectional_attention": (None, None), "hidden_activation": (None, None)},
    scored="GemmaForSequenceClassification",
)
_OLMO = ModelType(
    architecture="OlmoForCausalLM",
    model_type="olmo",
    sizes=(50304, 2048, 4096, 32, 32, 11008),
    epsilon=("", 1e-5),
    fixed={"clip_qkv": (None, None)},
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
    scored="Olmo2ForSequenceClassification",
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


def _model(
    layers: int,
    hidden: int,
    heads: int,
    key_value_heads: int,
    mlp: int,
    vocabulary: int,
    norm_epsilon: float,
    **others: Any,
) -> dict[str, Any]:
    """Return the keys of [model] of a preset."""
    own = {"layers": layers, "hidden": hidden, "heads": heads, "key_value_heads": key_value_heads}
    return {**own, "mlp": mlp, "vocabulary": vocabulary, "norm_epsilon": norm_epsilon, **others}


def _granite(attention_scale: float, logit_multiplier: float) -> dict[str, float]:
    """Return the multipliers of a Granite model."""
    usual = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    return {**usual, "attention_scale": attention_scale, "logit_multiplier": logit_multiplier}


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
        "llama": Family(defaults=FamilyDefaults()),
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
        "granite": Family(
            defaults=FamilyDefaults(),
            model_types=(_GRANITE,),
            presets={
                "granite-3-2b": {
                    "source": "Granite 3.0: IBM 2024, huggingface.co/ibm-granite",
                    "sequence": 4096,
                    "model": _model(40, 2048, 32, 8, 8192, 49155, 1e-5, tied=True, **_granite(1 / 64, 1 / 8)),
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
