"""Configs of families of mixtures in the table, and what is refused of them.

Tests of checkpoint/exchange/hugging_face/export_choice.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpctrain.checkpoint.exchange.hugging_face import export_choice
from hpctrain.checkpoint.exchange.hugging_face.architectures import ARCHITECTURES
from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.hugging_face.config_writer import config_of
from hpctrain.checkpoint.exchange.hugging_face.export_choice import architecture_for_export
from hpctrain.errors import HpctrainError
from tests.checkpoint.exchange.test_families import GPT_OSS, QWEN2_MOE, USUAL


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit = 5.0: unsupported; expected 7.0 for gpt_oss"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "expected None or quant_method = 'fp8' or 'mxfp4'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': unsupported; expected 'silu' for gpt_oss"),
    ],
)
def test_configs_of_gpt_oss_that_are_refused(keys: dict[str, Any], problem: str) -> None:
    config = {**USUAL, **GPT_OSS, "architectures": ["GptOssForCausalLM"], **keys}
    with pytest.raises(HpctrainError) as caught:
        shape_of(config, "config.json")
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_positions_of_gpt_oss_are_scaled_unless_a_config_says_otherwise() -> None:
    shape = shape_of({"architectures": ["GptOssForCausalLM"]}, "config.json")
    assert shape.rope_scaling is not None
    assert (shape.rope_scaling.kind, shape.rope_scaling.factor, shape.rope_base) == ("yarn", 32.0, 150_000.0)
    assert shape.experts is not None
    assert (shape.windows, shape.experts.count, shape.hidden) == ((128, 0), 128, 2880)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"shared_expert_intermediate_size": 50},
            "shared_expert_intermediate_size = 50: must be a multiple of moe_intermediate_size = 20",
        ),
        ({"mlp_only_layers": "1"}, "mlp_only_layers = '1': must be a list of numbers of layers from 0 to 2"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers = [True]: must be a list of numbers of layers"),
        ({"mlp_only_layers": [0, -1]}, "mlp_only_layers = [0, -1]: must be a list of numbers of layers"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers = [3]: must be a list of numbers of layers"),
        ({"mlp_only_layers": False}, "mlp_only_layers = False: must be a list of numbers of layers"),
        ({"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers = [0, 1, 2]: leaves no layer with experts"),
        ({"decoder_sparse_step": 4}, "decoder_sparse_step = 4: leaves no layer with experts"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config = {'quant_method': 'mxfp4'}",
        ),
        ({"use_sliding_window": True}, "sliding_window = 4096: requires layer_types, a list of the kinds"),
        (
            {"layer_types": ["sliding_attention"] * 3},
            "use_sliding_window = False: must be true, since layer_types has 'sliding_attention'",
        ),
        ({"hidden_act": "mish"}, "hidden_act = 'mish': unsupported"),
    ],
)
def test_configs_that_are_refused(keys: dict[str, Any], problem: str) -> None:
    config = {**USUAL, **QWEN2_MOE, "architectures": ["Qwen2MoeForCausalLM"], **keys}
    with pytest.raises(HpctrainError) as caught:
        shape_of(config, "config.json")
    assert caught.value.exit_code == 2
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_a_file_may_have_dense_first_and_mlp_only_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    of = ARCHITECTURES["Qwen2MoeForCausalLM"]
    mixture = of.files.mixture
    assert mixture is not None
    mixture = replace(mixture, sizes={**mixture.sizes, "dense_first": ("first_k_dense_replace", 0)})
    both = replace(of, files=replace(of.files, mixture=mixture))
    monkeypatch.setattr(export_choice, "LANGUAGE_MODELS", [both])
    shape = shape_of({**USUAL, **QWEN2_MOE, "architectures": [of.name]}, "config.json")
    assert architecture_for_export(shape) == both


def test_a_family_without_an_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_choice, "LANGUAGE_MODELS", [ARCHITECTURES["GPT2LMHeadModel"]])
    shape = shape_of({**USUAL, "architectures": ["LlamaForCausalLM"]}, "config.json")
    with pytest.raises(
        HpctrainError, match=r'model\.family = "llama": transformers has no such model'
    ) as caught:
        config_of(shape, "float32")
    assert caught.value.exit_code == 2
