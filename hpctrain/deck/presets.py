"""Published model shapes, by name. The parameter counts that they lead to are tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

_TINY_LLAMA = "TinyLlama 1.1B: Zhang et al. 2024, arXiv 2401.02385"
_LLAMA_2 = "Llama 2 70B: Touvron et al. 2023, arXiv 2307.09288"


Family = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder-only transformer's matrices."""

    family: Family
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    mlp: int
    vocabulary: int


@dataclass(frozen=True)
class Preset(Sizes):
    """A shape: the keys of the deck's [model] that it fills, batch.sequence, and who published it."""

    tied: bool
    norm_epsilon: float
    sequence: int
    source: str

    def model_keys(self) -> dict[str, object]:
        """The [model] keys with their values."""
        others = ("sequence", "source")
        return {name: value for name, value in vars(self).items() if name not in others}


def _gpt2(layers: int, hidden: int, heads: int) -> Preset:
    source = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners"
    return Preset("gpt2", layers, hidden, heads, heads, 4 * hidden, 50257, True, 1e-5, 1024, source)


def _megatron(layers: int, hidden: int, heads: int) -> Preset:
    source = "Narayanan et al. 2021, arXiv 2104.04473, table 1"
    return Preset("gpt2", layers, hidden, heads, heads, 4 * hidden, 51200, True, 1e-5, 2048, source)


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    mlp: int,
    *,
    key_value_heads: int | None = None,
    norm_epsilon: float = 1e-5,
    sequence: int = 2048,
    source: str = "Touvron et al. 2023, arXiv 2302.13971",
) -> Preset:
    shared = key_value_heads or heads
    return Preset("llama", layers, hidden, heads, shared, mlp, 32000, False, norm_epsilon, sequence, source)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gpt2-124m": _gpt2(12, 768, 12),
        "gpt2-355m": _gpt2(24, 1024, 16),
        "gpt2-774m": _gpt2(36, 1280, 20),
        "gpt2-1.5b": _gpt2(48, 1600, 25),
        "llama-1b": _llama(22, 2048, 32, 5632, key_value_heads=4, source=_TINY_LLAMA),
        "llama-7b": _llama(32, 4096, 32, 11008, norm_epsilon=1e-6),
        "llama-13b": _llama(40, 5120, 40, 13824, norm_epsilon=1e-6),
        "llama-65b": _llama(80, 8192, 64, 22016),
        "llama-70b": _llama(80, 8192, 64, 28672, key_value_heads=8, sequence=4096, source=_LLAMA_2),
        "megatron-1.7b": _megatron(24, 2304, 24),
        "megatron-18.4b": _megatron(40, 6144, 48),
        "megatron-76.1b": _megatron(60, 10240, 80),
        "megatron-310.1b": _megatron(96, 16384, 128),
        "megatron-1008b": _megatron(128, 25600, 160),
    }
)

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]
