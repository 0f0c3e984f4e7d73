"""Configs of DeepSeek: the scale of scores under yarn, and what is refused.

Tests of checkpoint/exchange/hugging_face/yarn_scale.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.hugging_face.config_writer import config_of
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.errors import HpctrainError
from hpctrain.model.attention.rotary import RotaryFrequencies
from hpctrain.model.shape import ModelShape

transformers = pytest.importorskip("transformers")
ROPE_INIT_FUNCTIONS = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS

SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 36,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "kv_lora_rank": 10,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 40,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}


def read(**changes: Any) -> ModelShape:
    """Return the shape of the config with changes."""
    return shape_of({**SMALL, **changes}, "config.json")


@pytest.mark.parametrize("mscale", [0.707, 1.0, 1, 0.1234567])
@pytest.mark.parametrize("alike", [True, False])
def test_a_written_config_has_the_scale_of_the_one_that_was_read(mscale: float, alike: bool) -> None:
    scaling = {**YARN, "mscale_all_dim": mscale, "mscale": mscale if alike else 2 * mscale}
    shape = read(rope_scaling=scaling)
    assert shape.attention_scale is not None and shape.attention_scale > 14**-0.5
    written = config_of(shape, "float32")
    assert written["rope_scaling"]["mscale_all_dim"] == mscale
    assert written["rope_scaling"]["mscale"] == scaling["mscale"]
    assert "attention_factor" not in written["rope_scaling"]
    assert shape_of(written, "config.json") == shape
    assert read().attention_scale is None and "rope_scaling" not in config_of(read(), "float32")


def vllm_attention_factor(table: dict[str, Any]) -> float:
    """Return the factor of rotated queries and keys as DeepseekScalingRotaryEmbedding of vLLM computes it.

    It reads neither `attention_factor` nor defaults of `transformers`.
    """
    mscale, all_dim = (0.1 * table.get(*key) * log(table["factor"]) + 1 for key in VLLM_DEFAULTS.items())
    return mscale / all_dim


VLLM_DEFAULTS = {"mscale": 1.0, "mscale_all_dim": 0.0}


@pytest.mark.parametrize(
    "keys",
    [
        {"mscale": 2.0, "mscale_all_dim": 0.5},
        {"mscale_all_dim": 0.7},
        {"mscale_all_dim": 0.9, "attention_factor": 1.0},
        {"mscale_all_dim": 0.9, "attention_factor": 1.2345},
        {"mscale_all_dim": 0.9, "attention_factor": 0.9345},
        {"attention_factor": 1.0},
        {"attention_factor": 1.1},
        {"attention_factor": 0.1 * log(4) + 1},
        {"mscale": 0.707, "mscale_all_dim": 0.707},
        {},
    ],
)
def test_written_keys_of_yarn_mean_the_same_in_transformers_and_vllm(keys: dict[str, float]) -> None:
    shape = read(rope_scaling={**YARN, **keys})
    expected = RotaryFrequencies.of(shape)
    written = config_of(shape, "float32")
    assert shape_of(written, "config.json") == shape
    assert config_of(shape, "float32", {"rope_scaling": {**YARN, **keys}}) == written
    assert vllm_attention_factor(written["rope_scaling"]) == pytest.approx(
        expected.attention_factor, rel=1e-15
    )
    config = transformers.DeepseekV3Config(**written)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    assert attention_factor == expected.attention_factor
    angles = expected.angles_per_position(torch.device("cpu"))
    torch.testing.assert_close(angles, frequencies.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("head_size", [32, 128, 192, 14])
@pytest.mark.parametrize("scaling", [None, {**YARN, "attention_factor": 1.0}])
def test_a_default_scale_that_is_written_out_needs_no_key(
    head_size: int, scaling: dict[str, Any] | None
) -> None:
    shape = read(qk_nope_head_dim=head_size - 6, rope_scaling=scaling)
    for scale in (head_size**-0.5, 1 / sqrt(head_size)):
        written = config_of(replace(shape, attention_scale=scale), "float32")
        assert written == config_of(shape, "float32")
        assert not written.get("rope_scaling", {}).get("mscale_all_dim")
        assert shape_of(written, "config.json") == shape
    llama = replace(shape, family="llama", latent=None, experts=None, rope_scaling=None)
    assert config_of(replace(llama, attention_scale=head_size**-0.5), "float32") == config_of(
        llama, "float32"
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must be num_attention_heads = 6"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim = 5: must be even"),
        ({"qk_nope_head_dim": 7}, "qk_nope_head_dim = 7: must be even"),
        ({"v_head_dim": 16}, "v_head_dim = 16: must be at most qk_nope_head_dim + qk_rope_head_dim"),
        ({"kv_lora_rank": "many"}, "kv_lora_rank = 'many': must be a whole number"),
        ({"attention_bias": True}, "attention_bias = True: unsupported; expected False"),
        ({"rope_interleave": False}, "rope_interleave = False: unsupported; expected True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2: unsupported; expected 1"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax': unsupported; expected 'sigmoid'"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"},
            "topk_method = 'noaux_tc': must be 'greedy' or 'group_limited_greedy'",
        ),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True},
            "norm_topk_prob = True: unsupported; expected False",
        ),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        read(**changes)
    assert caught.value.exit_code == 2
    assert any(f"config.json: {told}" in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("deepseek-v3", {"latent": None}, "has latent attention"),
        ("llama", {}, "has no latent attention"),
        ("deepseek-v3", {"attention_scale": 0.9}, "supports a scale other than 1 / sqrt(head_size) only"),
        (
            "deepseek-v2",
            {"experts": {"router_groups": 2, "router": "softmax", "balance": "loss"}},
            "router_group_best = 2",
        ),
    ],
)
def test_models_that_cannot_be_exported(family: str, changes: dict[str, Any], told: str) -> None:
    shape = read()
    if keys := changes.get("experts"):
        assert shape.experts is not None
        changes = {**changes, "experts": ExpertsTable(**{**dict(shape.experts), **keys})}
    shape = replace(shape, family=family, **changes)
    shape = replace(shape, experts=None) if family == "llama" else shape
    with pytest.raises(HpctrainError) as caught:
        config_of(shape, "float32")
    assert caught.value.exit_code == 2 and told in str(caught.value), caught.value
