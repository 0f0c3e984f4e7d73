"""Configs with one wrong size: its message is the only one."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.checkpoint.exchange.hugging_face.architectures import ARCHITECTURES
from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.deck.families.computation_keys import NEUTRAL_VALUES, ROPE_TABLES, ignored_key_problem
from hpctrain.deck.family import ModelType
from hpctrain.errors import HpctrainError

LAYERS = 3


def lists_of_layers(files: ModelType) -> dict[str, Any]:
    """Return keys of a config.json whose values have an element for each layer."""
    keys: dict[str, Any] = {key.name: [1, 1, 0] for key in files.keys if key.form == "layers"}
    if files.windows is not None and files.windows.has_layer_types:
        keys["layer_types"] = ["full_attention"] * LAYERS
    if files.mixture is not None and "every" in files.mixture.sizes:
        keys["mlp_only_layers"] = [1]
    return keys


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.head == "vocabulary"])
def test_each_wrong_size_has_one_message(name: str) -> None:
    files = ARCHITECTURES[name].files
    config = {
        "architectures": [name],
        "num_experts_per_tok": 1,
        files.config_sizes["layers"][0]: LAYERS,
        **lists_of_layers(files),
    }
    further = {**({} if files.mixture is None else files.mixture.sizes), **files.latent}
    keys = [*files.size_keys, *(key for key, _ in further.values())]
    if files.grouped:
        keys += ["num_key_value_heads", *(() if files.latent else ("head_dim",))]
    for key in keys:
        for value in (-1, "many"):
            with pytest.raises(HpctrainError) as caught:
                shape_of({**config, key: value}, "config.json")
            (problem,) = caught.value.problems
            assert f"config.json: {key} = {value!r}: must be a whole number from " in problem


WITH_TENSORS = {
    "attention_bias",
    "mlp_bias",
    "use_bias",
    "qkv_bias",
    "use_qkv_bias",
    "use_qk_norm",
    "qk_layernorm",
}
"""Keys of which the tensors of a folder show whether the model has what they say."""


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.head == "vocabulary"])
def test_keys_that_only_other_architectures_have_are_refused(name: str) -> None:
    files = ARCHITECTURES[name].files
    assert {key.name for key in files.keys} <= NEUTRAL_VALUES.keys() | WITH_TENSORS
    config = {"architectures": [name], "num_experts_per_tok": 1}
    others = NEUTRAL_VALUES.keys() - ARCHITECTURES[name].computation_keys
    assert len(others) >= len(NEUTRAL_VALUES) - 11
    plain = shape_of(config, "config.json")
    neutral = {key: NEUTRAL_VALUES[key][-1] for key in others if key not in ROPE_TABLES}
    assert shape_of({**config, **neutral}, "config.json") == plain
    for key in others:
        for value in (3, not NEUTRAL_VALUES[key][-1], [5, 5]):
            with pytest.raises(HpctrainError) as caught:
                shape_of({**config, key: value}, "config.json")
            problem = ignored_key_problem(files.model_type)
            assert caught.value.problems == (f"config.json: {key} = {value!r}: {problem}",)


def test_latent_attention_rotates_at_least_two_features() -> None:
    with pytest.raises(HpctrainError) as caught:
        shape_of({"architectures": ["DeepseekV3ForCausalLM"], "qk_rope_head_dim": 1}, "config.json")
    assert caught.value.problems == (
        "config.json: qk_rope_head_dim = 1: must be a whole number from 2 to 10000000",
    )


def test_heads_of_olmoe_have_the_width_that_its_norms_need() -> None:
    config = {"architectures": ["OlmoeForCausalLM"], "head_dim": 64}
    with pytest.raises(HpctrainError) as caught:
        shape_of(config, "config.json")
    message = "config.json: head_dim = 64: must be hidden_size / num_attention_heads"
    assert caught.value.problems == (message,)
    assert shape_of({**config, "head_dim": 128}, "config.json").head_size == 128
