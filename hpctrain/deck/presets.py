"""Published model shapes, by name. The parameter counts that they lead to are tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

_TINY_LLAMA = "TinyLlama 1.1B: Zhang et al. 2024, arXiv 2401.02385"
_LLAMA_2 = "Llama 2 70B: Touvron et al. 2023, arXiv 2307.09288"


Family = Literal["gpt2", "llama"]
Router = Literal["softmax", "sigmoid"]
QueryKeyNorm = Literal["none", "head", "all"]


@dataclass(frozen=True, kw_only=True)
class PresetSizes:
    """The sizes of a decoder-only transformer's matrices, and how its mixtures route.

    A `head_size` of 0 stands for hidden / heads.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    mlp: int
    vocabulary: int
    head_size: int = 0
    query_key_norm: QueryKeyNorm = "none"
    experts: int = 0
    experts_per_token: int = 2
    expert_mlp: int = 0
    shared_experts: int = 0
    expert_every: int = 1
    dense_first: int = 0
    router: Router = "softmax"
    router_normalize: bool = True
    router_scale: float = 1.0
    router_groups: int = 1
    router_groups_per_token: int = 1


EXPERT_KEYS: Mapping[str, str] = {
    "experts": "count",
    "experts_per_token": "per_token",
    "expert_mlp": "mlp",
    "shared_experts": "shared",
    "expert_every": "every",
    "dense_first": "dense_first",
    "router": "router",
    "router_normalize": "router_normalize",
    "router_scale": "router_scale",
    "router_groups": "router_groups",
    "router_groups_per_token": "router_groups_per_token",
}
"""Fields of sizes that describe mixtures -> keys of [model.experts]."""


@dataclass(frozen=True, kw_only=True)
class Preset(PresetSizes):
    """Published model: keys of [model] and batch.sequence that the preset fills, and its source."""

    tied: bool
    norm_epsilon: float
    sequence: int
    source: str
    rope_base: float = 10_000.0

    def model_keys(self) -> dict[str, object]:
        """Return the keys of [model] with their values; heads and rotation only if they are unusual."""
        usual = {"head_size": 0, "query_key_norm": "none", "rope_base": 10_000.0}
        others = {"sequence", "source", *EXPERT_KEYS}
        others |= {name for name, value in usual.items() if getattr(self, name) == value}
        keys = {name: value for name, value in vars(self).items() if name not in others}
        if self.experts:
            keys["experts"] = {key: getattr(self, name) for name, key in EXPERT_KEYS.items()}
        return keys


def _preset_of_gpt2(
    layers: int, hidden: int, heads: int, vocabulary: int, sequence: int, source: str
) -> Preset:
    return Preset(
        family="gpt2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        mlp=4 * hidden,
        vocabulary=vocabulary,
        tied=True,
        norm_epsilon=1e-5,
        sequence=sequence,
        source=source,
    )


def _gpt2(layers: int, hidden: int, heads: int) -> Preset:
    source = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners"
    return _preset_of_gpt2(layers, hidden, heads, 50257, 1024, source)


def _megatron(layers: int, hidden: int, heads: int) -> Preset:
    source = "Narayanan et al. 2021, arXiv 2104.04473, table 1"
    return _preset_of_gpt2(layers, hidden, heads, 51200, 2048, source)


def _llama(layers: int, hidden: int, heads: int, mlp: int, norm_epsilon: float = 1e-5) -> Preset:
    return Preset(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        mlp=mlp,
        vocabulary=32000,
        tied=False,
        norm_epsilon=norm_epsilon,
        sequence=2048,
        source="Touvron et al. 2023, arXiv 2302.13971",
    )


_MIXTRAL = Preset(
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    key_value_heads=8,
    mlp=14336,
    vocabulary=32000,
    experts=8,
    experts_per_token=2,
    expert_mlp=14336,
    tied=False,
    norm_epsilon=1e-5,
    rope_base=1e6,
    sequence=32768,
    source="Mixtral: Jiang et al. 2024, arXiv 2401.04088",
)
_QWEN3 = Preset(
    family="llama",
    layers=48,
    hidden=2048,
    heads=32,
    key_value_heads=4,
    head_size=128,
    query_key_norm="head",
    mlp=6144,
    vocabulary=151936,
    experts=128,
    experts_per_token=8,
    expert_mlp=768,
    tied=False,
    norm_epsilon=1e-6,
    rope_base=1e6,
    sequence=4096,
    source="Qwen3: Yang et al. 2025, arXiv 2505.09388",
)
_OLMOE = Preset(
    family="llama",
    layers=16,
    hidden=2048,
    heads=16,
    key_value_heads=16,
    query_key_norm="all",
    mlp=1024,
    vocabulary=50304,
    experts=64,
    experts_per_token=8,
    expert_mlp=1024,
    router_normalize=False,
    tied=False,
    norm_epsilon=1e-5,
    sequence=4096,
    source="OLMoE: Muennighoff et al. 2024, arXiv 2409.02060",
)
_TINY_MIXTRAL = replace(
    _MIXTRAL,
    layers=4,
    hidden=128,
    heads=4,
    key_value_heads=2,
    mlp=256,
    expert_mlp=256,
    sequence=256,
    source="Mixtral with small sizes, for experiments",
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gpt2-124m": _gpt2(12, 768, 12),
        "gpt2-355m": _gpt2(24, 1024, 16),
        "gpt2-774m": _gpt2(36, 1280, 20),
        "gpt2-1.5b": _gpt2(48, 1600, 25),
        "llama-1b": replace(_llama(22, 2048, 32, 5632), key_value_heads=4, source=_TINY_LLAMA),
        "llama-7b": _llama(32, 4096, 32, 11008, norm_epsilon=1e-6),
        "llama-13b": _llama(40, 5120, 40, 13824, norm_epsilon=1e-6),
        "llama-65b": _llama(80, 8192, 64, 22016),
        "llama-70b": replace(_llama(80, 8192, 64, 28672), key_value_heads=8, sequence=4096, source=_LLAMA_2),
        "megatron-1.7b": _megatron(24, 2304, 24),
        "megatron-18.4b": _megatron(40, 6144, 48),
        "megatron-76.1b": _megatron(60, 10240, 80),
        "megatron-310.1b": _megatron(96, 16384, 128),
        "megatron-1008b": _megatron(128, 25600, 160),
        "mixtral-tiny": _TINY_MIXTRAL,
        "mixtral-8x7b": _MIXTRAL,
        "olmoe-1b-7b": _OLMOE,
        "qwen3-30b-a3b": _QWEN3,
    }
)

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]
