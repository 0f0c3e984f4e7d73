"""Presets of models with the shape of Llama: Llama, Qwen, SmolLM 2, Mistral, Yi, OLMoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.deck.families.preset_keys import expert_keys, model_keys, preset_series

_LLAMA3_SCALING = {
    "kind": "llama3",
    "original_sequence": 8192,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
}
"""Scaling of the rotary positions of Llama 3.1 to 3.3, without the factor."""

_QWEN2 = {"attention_bias": "query_key_value", "rope_base": 1e6}
"""Keys of [model] that all models of Qwen2 and Qwen2.5 have."""

_QWEN3 = {"head_size": 128, "query_key_norm": "head", "rope_base": 1e6}
"""Keys of [model] that all models of Qwen3 have."""

_QWEN2_REPORT = "Qwen2: Yang et al. 2024, arXiv 2407.10671"
_QWEN3_REPORT = "Qwen3: Yang et al. 2025, arXiv 2505.09388"


LLAMA_PRESETS: Mapping[str, Mapping[str, Any]] = {
    **preset_series(
        "TinyLlama 1.1B: Zhang et al. 2024, arXiv 2401.02385",
        2048,
        {"llama-1b": model_keys(22, 2048, 32, 4, 5632, 32000, 1e-5)},
    ),
    **preset_series(
        "Touvron et al. 2023, arXiv 2302.13971",
        2048,
        {
            "llama-7b": model_keys(32, 4096, 32, 32, 11008, 32000, 1e-6),
            "llama-13b": model_keys(40, 5120, 40, 40, 13824, 32000, 1e-6),
            "llama-65b": model_keys(80, 8192, 64, 64, 22016, 32000, 1e-5),
        },
    ),
    **preset_series(
        "Llama 2: Touvron et al. 2023, arXiv 2307.09288",
        4096,
        {
            "llama-70b": model_keys(80, 8192, 64, 8, 28672, 32000, 1e-5),
            "llama-2-7b": model_keys(32, 4096, 32, 32, 11008, 32000, 1e-5),
            "llama-2-13b": model_keys(40, 5120, 40, 40, 13824, 32000, 1e-5),
        },
    ),
    **preset_series(
        "Llama 3: Grattafiori et al. 2024, arXiv 2407.21783",
        8192,
        {
            "llama-3-8b": model_keys(32, 4096, 32, 8, 14336, 128256, 1e-5),
            "llama-3-70b": model_keys(80, 8192, 64, 8, 28672, 128256, 1e-5),
        },
        {"rope_base": 5e5},
    ),
    **preset_series(
        "Llama 3.1: Grattafiori et al. 2024, arXiv 2407.21783",
        8192,
        {
            "llama-3.1-8b": model_keys(32, 4096, 32, 8, 14336, 128256, 1e-5),
            "llama-3.1-70b": model_keys(80, 8192, 64, 8, 28672, 128256, 1e-5),
            "llama-3.1-405b": model_keys(126, 16384, 128, 8, 53248, 128256, 1e-5),
        },
        {"rope_base": 5e5},
        {**_LLAMA3_SCALING, "factor": 8.0},
    ),
    **preset_series(
        "Llama 3.3: model card of Meta, 2024",
        8192,
        {"llama-3.3-70b": model_keys(80, 8192, 64, 8, 28672, 128256, 1e-5)},
        {"rope_base": 5e5},
        {**_LLAMA3_SCALING, "factor": 8.0},
    ),
    **preset_series(
        "Llama 3.2: model card of Meta, 2024",
        8192,
        {
            "llama-3.2-1b": model_keys(16, 2048, 32, 8, 8192, 128256, 1e-5),
            "llama-3.2-3b": model_keys(28, 3072, 24, 8, 8192, 128256, 1e-5),
        },
        {"rope_base": 5e5, "tied": True},
        {**_LLAMA3_SCALING, "factor": 32.0},
    ),
    **preset_series(
        _QWEN2_REPORT,
        32768,
        {
            "qwen2-0.5b": model_keys(24, 896, 14, 2, 4864, 151936, 1e-6, tied=True),
            "qwen2-1.5b": model_keys(28, 1536, 12, 2, 8960, 151936, 1e-6, tied=True),
            "qwen2-7b": model_keys(28, 3584, 28, 4, 18944, 152064, 1e-6),
            "qwen2-72b": model_keys(80, 8192, 64, 8, 29568, 152064, 1e-5),
        },
        _QWEN2,
    ),
    **preset_series(
        "Qwen2.5: Yang et al. 2024, arXiv 2412.15115",
        4096,
        {
            "qwen2.5-0.5b": model_keys(24, 896, 14, 2, 4864, 151936, 1e-6, tied=True),
            "qwen2.5-1.5b": model_keys(28, 1536, 12, 2, 8960, 151936, 1e-6, tied=True),
            "qwen2.5-3b": model_keys(36, 2048, 16, 2, 11008, 151936, 1e-6, tied=True),
            "qwen2.5-7b": model_keys(28, 3584, 28, 4, 18944, 152064, 1e-6),
            "qwen2.5-14b": model_keys(48, 5120, 40, 8, 13824, 152064, 1e-5),
            "qwen2.5-32b": model_keys(64, 5120, 40, 8, 27648, 152064, 1e-5),
            "qwen2.5-72b": model_keys(80, 8192, 64, 8, 29568, 152064, 1e-5),
        },
        _QWEN2,
    ),
    **preset_series(
        _QWEN3_REPORT,
        4096,
        {
            "qwen3-0.6b": model_keys(28, 1024, 16, 8, 3072, 151936, 1e-6, tied=True),
            "qwen3-1.7b": model_keys(28, 2048, 16, 8, 6144, 151936, 1e-6, tied=True),
            "qwen3-4b": model_keys(36, 2560, 32, 8, 9728, 151936, 1e-6, tied=True),
            "qwen3-8b": model_keys(36, 4096, 32, 8, 12288, 151936, 1e-6),
            "qwen3-14b": model_keys(40, 5120, 40, 8, 17408, 151936, 1e-6),
            "qwen3-32b": model_keys(64, 5120, 64, 8, 25600, 151936, 1e-6),
        },
        _QWEN3,
    ),
    **preset_series(
        "SmolLM2: Ben Allal et al. 2025, arXiv 2502.02737",
        8192,
        {
            "smollm2-135m": model_keys(30, 576, 9, 3, 1536, 49152, 1e-5, rope_base=1e5),
            "smollm2-360m": model_keys(32, 960, 15, 5, 2560, 49152, 1e-5, rope_base=1e5),
            "smollm2-1.7b": model_keys(24, 2048, 32, 32, 8192, 49152, 1e-5, rope_base=1.3e5),
        },
        {"tied": True},
    ),
    **preset_series(
        "Mistral 7B v0.1: Jiang et al. 2023, arXiv 2310.06825",
        32768,
        {"mistral-7b-v0.1": model_keys(32, 4096, 32, 8, 14336, 32000, 1e-5, windows=[4096])},
    ),
    **preset_series(
        "Mistral 7B v0.3: Jiang et al. 2023, arXiv 2310.06825",
        32768,
        {"mistral-7b": model_keys(32, 4096, 32, 8, 14336, 32768, 1e-5, rope_base=1e6)},
    ),
    **preset_series(
        "Ministral 8B: model card of Mistral AI, 2024",
        131072,
        {"ministral-8b": model_keys(36, 4096, 32, 8, 12288, 131072, 1e-5)},
        {"head_size": 128, "rope_base": 1e8, "windows": [0, 32768, 32768, 32768]},
    ),
    **preset_series(
        "Mistral NeMo: model card of Mistral AI and NVIDIA, 2024",
        8192,
        {"mistral-12b": model_keys(40, 5120, 32, 8, 14336, 131072, 1e-5, head_size=128, rope_base=1e6)},
    ),
    **preset_series(
        "Mistral Small 3: model card of Mistral AI, 2025",
        32768,
        {"mistral-24b": model_keys(40, 5120, 32, 8, 32768, 131072, 1e-5, head_size=128, rope_base=1e8)},
    ),
    **preset_series(
        "Yi: Young et al. 2024, arXiv 2403.04652",
        4096,
        {
            "yi-6b": model_keys(32, 4096, 32, 4, 11008, 64000, 1e-5),
            "yi-34b": model_keys(60, 7168, 56, 8, 20480, 64000, 1e-5),
        },
        {"rope_base": 5e6},
    ),
    **preset_series(
        "DeepSeek LLM: Bi et al. 2024, arXiv 2401.02954",
        4096,
        {"deepseek-7b": model_keys(30, 4096, 32, 32, 11008, 102400, 1e-6)},
    ),
    "mixtral-tiny": {
        "source": "Mixtral with small sizes, for experiments",
        "sequence": 256,
        "model": model_keys(4, 128, 4, 2, 256, 32000, 1e-5, rope_base=1e6),
        "experts": expert_keys(8, 2, 256, True),
    },
    "mixtral-8x7b": {
        "source": "Mixtral: Jiang et al. 2024, arXiv 2401.04088",
        "sequence": 32768,
        "model": model_keys(32, 4096, 32, 8, 14336, 32000, 1e-5, rope_base=1e6),
        "experts": expert_keys(8, 2, 14336, True),
    },
    "olmoe-1b-7b": {
        "source": "OLMoE: Muennighoff et al. 2024, arXiv 2409.02060",
        "sequence": 4096,
        "model": model_keys(16, 2048, 16, 16, 1024, 50304, 1e-5, query_key_norm="all"),
        "experts": expert_keys(64, 8, 1024, False),
    },
    "qwen3-30b-a3b": {
        "source": _QWEN3_REPORT,
        "sequence": 4096,
        "model": model_keys(48, 2048, 32, 4, 6144, 151936, 1e-6, **_QWEN3),
        "experts": expert_keys(128, 8, 768, True),
    },
    "mixtral-8x22b": {
        "source": "Mixtral 8x22B: Mistral AI 2024, huggingface.co/mistralai",
        "sequence": 65536,
        "model": model_keys(56, 6144, 48, 8, 16384, 32000, 1e-5, rope_base=1e6),
        "experts": expert_keys(8, 2, 16384, True),
    },
    "qwen1.5-moe-a2.7b": {
        "source": "Qwen1.5-MoE: Qwen Team 2024, qwenlm.github.io/blog/qwen-moe",
        "sequence": 8192,
        "model": model_keys(24, 2048, 16, 16, 5632, 151936, 1e-6, **_QWEN2),
        "experts": expert_keys(60, 4, 1408, False, shared=4, shared_gate=True),
    },
    "qwen2-57b-a14b": {
        "source": _QWEN2_REPORT,
        "sequence": 32768,
        "model": model_keys(28, 3584, 28, 4, 18944, 151936, 1e-6, **_QWEN2),
        "experts": expert_keys(64, 8, 2560, False, shared=8, shared_gate=True),
    },
    "qwen3-235b-a22b": {
        "source": _QWEN3_REPORT,
        "sequence": 32768,
        "model": model_keys(94, 4096, 64, 4, 12288, 151936, 1e-6, **_QWEN3),
        "experts": expert_keys(128, 8, 1536, True),
    },
}
"""Presets of the family llama by their names."""
