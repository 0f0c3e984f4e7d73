"""Published config.json files, and the files that version 5 of `transformers` has in their place.

Tests of rope_parameters.py beside other files in checkpoint/exchange/hugging_face/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.hugging_face.config_writer import config_of
from hpctrain.checkpoint.exchange.source import model_keys
from hpctrain.deck.presets import presets
from hpctrain.deck.read import parse_deck
from hpctrain.model.attention.rotary import RotaryFrequencies
from hpctrain.model.shape import ModelShape

transformers = pytest.importorskip("transformers")

LLAMA_3_1 = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
  "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
  "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"
  },
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128256
}"""
QWEN_2_5 = """{
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
  "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
  "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 152064,
  "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
}"""
MISTRAL = """{
  "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
  "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000
}"""
LONG = """[
  1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601, 1.5899999141693115,
  1.600000023841858, 1.6200000047683716, 2.620000123977661, 3.2300000190734863, 3.2300000190734863,
  4.789999961853027, 7.400000095367432, 7.700000286102295, 9.09000015258789, 12.199999809265137,
  17.670000076293945, 24.46000099182129, 28.57000160217285, 30.420001983642578, 30.840002059936523,
  32.590003967285156, 32.93000411987305, 42.320003509521484, 44.96000289916992, 50.340003967285156,
  50.45000457763672, 57.55000305175781, 57.93000411987305, 58.21000289916992, 60.1400032043457,
  62.61000442504883, 62.62000274658203, 62.71000289916992, 63.1400032043457, 63.1400032043457,
  63.77000427246094, 63.93000411987305, 63.96000289916992, 63.970001220703125, 64.02999877929688,
  64.06999969482422, 64.08000183105469, 64.12000274658203, 64.41000366210938, 64.4800033569336,
  64.51000213623047, 64.52999877929688, 64.83999633789062
]"""
SHORT = """[
  1.0, 1.0199999809265137, 1.0299999713897705, 1.0299999713897705, 1.0499999523162842, 1.0499999523162842,
  1.0499999523162842, 1.0499999523162842, 1.0499999523162842, 1.0699999332427979, 1.0999999046325684,
  1.1099998950958252, 1.1599998474121094, 1.1599998474121094, 1.1699998378753662, 1.2899998426437378,
  1.339999794960022, 1.679999828338623, 1.7899998426437378, 1.8199998140335083, 1.8499997854232788,
  1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745, 2.0199997425079346,
  2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346,
  2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914,
  2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0799996852874756,
  2.0899996757507324, 2.189999580383301, 2.2199995517730713, 2.5899994373321533, 2.729999542236328,
  2.749999523162842, 2.8399994373321533
]"""
PHI_3_5 = f"""{{
  "architectures": ["Phi3ForCausalLM"], "attention_dropout": 0.0, "auto_map": {{
    "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"
  }},
  "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
  "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
  "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
  "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
  "rope_scaling": {{"long_factor": {LONG}, "short_factor": {SHORT}, "type": "longrope"}},
  "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.43.3", "use_cache": true, "attention_bias": false, "vocab_size": 32064
}}"""

PUBLISHED: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "llama-3.1": (
        LLAMA_3_1,
        "llama-3.1-8b",
        {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3", "rope_theta": 500000.0,
        },
    ),
    "qwen2.5-yarn": (
        QWEN_2_5,
        "qwen2.5-7b",
        {
            "factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn",
            "rope_theta": 1000000.0,
        },
    ),
    "mistral": (MISTRAL, None, {"rope_theta": 10000.0, "rope_type": "default"}),
    "phi-3.5-mini": (
        PHI_3_5,
        None,
        {
            "long_factor": json.loads(LONG), "short_factor": json.loads(SHORT), "rope_type": "longrope",
            "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096,
        },
    ),
}  # fmt: skip
"""A published file, the preset of its model, and the `rope_parameters` of a newer file."""


def older_file(name: str) -> dict[str, Any]:
    """Return a published file."""
    config: dict[str, Any] = json.loads(PUBLISHED[name][0])
    return config


def newer_file(name: str) -> dict[str, Any]:
    """Return the file of version 5, which has other keys for positions and for the format."""
    config = older_file(name)
    config |= {"rope_parameters": PUBLISHED[name][2], "dtype": config["torch_dtype"]}
    config["transformers_version"] = "5.0.0"
    return {
        key: value
        for key, value in config.items()
        if key not in {"rope_theta", "rope_scaling", "torch_dtype"}
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_generations_are_the_same_model(name: str) -> None:
    shape = shape_of(older_file(name), "config.json")
    assert shape_of(newer_file(name), "config.json") == shape
    config = transformers.AutoConfig.for_model(**older_file(name))
    rewritten = json.loads(config.to_json_string(use_diff=False))
    if "architectures" not in rewritten:
        rewritten["architectures"] = older_file(name)["architectures"]
    assert shape_of(rewritten, "config.json") == shape
    assert shape_of(config_of(shape, "bfloat16"), "config.json") == shape
    preset = PUBLISHED[name][1]
    if preset is not None:
        keys = {key: value for key, value in presets()[preset].model.items() if key != "rope_scaling"}
        settled = model_keys(shape)
        assert {key: settled[key] for key in keys} == keys


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    config = transformers.AutoConfig.for_model(**older_file(name))
    config.num_hidden_layers = 1
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    rotary = type(model.model.rotary_emb)(config)
    angles, _ = rotary(torch.zeros(1, 1, 1), torch.tensor([[config.max_position_embeddings - 1, 1]]))
    shape = shape_of(older_file(name), "config.json")
    ours = RotaryFrequencies.of(shape)
    expected = rotary.inv_freq.double()
    torch.testing.assert_close(ours.angles_per_position(torch.device("cpu")), expected, rtol=1e-5, atol=0)
    assert ours.attention_factor == pytest.approx(rotary.attention_scaling)
    assert angles.shape[-1] == 2 * len(expected)


def test_an_older_name_of_longrope_is_read() -> None:
    older = older_file("phi-3.5-mini")
    older["rope_scaling"]["type"] = "su"
    assert shape_of(older, "config.json") == shape_of(older_file("phi-3.5-mini"), "config.json")


OF_PRESETS: dict[str, Any] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8")
)
"""Keys of config.json files on huggingface.co that change what a model computes, by the preset of its sizes.

They were read in the folders that "source" names, or in copies of these files.
"""


@pytest.mark.parametrize("name", OF_PRESETS)
def test_presets_are_the_models_of_published_files(name: str) -> None:
    config = OF_PRESETS[name]["config"]
    deck = parse_deck(
        f'[run]\nsteps = 1\n[model]\npreset = "{name}"\n[data]\ntokens = "t.h5"\n[batch]\nglobal_size = 1\n'
    )
    preset = ModelShape.of(deck, deck.model.vocabulary)
    assert model_keys(preset) == model_keys(shape_of(config, "config.json"))
