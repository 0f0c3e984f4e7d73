"""Configs of models that were not imported: `transformers` makes a model of each, which computes.

Tests of checkpoint/exchange/model_files.py, too.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.exchange.hugging_face.architectures import ARCHITECTURES, LANGUAGE_MODELS
from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.hugging_face.config_writer import config_of
from hpctrain.checkpoint.exchange.model_files import model_files
from hpctrain.data.tokenizer_settings import TokenizerSettings
from hpctrain.deck.family import ModelType
from hpctrain.errors import HpctrainError
from tests.checkpoint.exchange.test_hugging_face import no_warnings

transformers = pytest.importorskip("transformers")
REFUSED = pytest.importorskip("huggingface_hub.errors").StrictDataclassError

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 40,
    "qk_rope_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
WINDOWED = [each.name for each in LANGUAGE_MODELS if each.files.windows is not None]


@pytest.mark.parametrize("name", WINDOWED)
def test_a_model_without_windows_computes(name: str) -> None:
    architecture = ARCHITECTURES[name]
    small = dict(SMALL)
    if architecture.files.local_rope:
        del small["rope_parameters"]
    shape = shape_of({**small, "architectures": [name]}, "config.json")
    if not (architecture.files.windows and architecture.files.windows.rotate):
        shape = replace(shape, windows=(), rope_local_base=None)
    imported = {"model_type": architecture.model_type}
    config = config_of(shape, "float32", imported)
    assert config["architectures"] == [name]
    assert shape_of(config, "config.json").windows == shape.windows
    kind = getattr(transformers, name)
    del config["architectures"], config["model_type"]
    model = kind(kind.config_class(**config, pad_token_id=None))
    with torch.no_grad():
        assert model(torch.ones(1, 12, dtype=torch.long)).logits.isfinite().all()


GROUPED = [each.name for each in LANGUAGE_MODELS if each.files.grouped]


@pytest.mark.parametrize("name", GROUPED)
def test_heads_that_do_not_divide_the_width_are_exported_where_transformers_takes_them(name: str) -> None:
    files = ARCHITECTURES[name].files
    small = (
        deepcopy(SMALL)
        | {"hidden_size": 26}
        | ({"head_dim": None, "first_k_dense_replace": 1} if files.latent else {})
    )
    if files.local_rope:
        del small["rope_parameters"]
    message = "multiple of the number of attention heads"
    with pytest.raises(REFUSED, match=message) if files.heads_divide_hidden else nullcontext():
        getattr(transformers, name).config_class(**deepcopy(small))
    if ARCHITECTURES[name].constant_fields.get("query_key_norm") == "all" or not files.has_head_size:
        return  # refused on import, since it needs heads of width / heads
    shape = shape_of({**small, "architectures": [name]}, "config.json")
    if not files.heads_divide_hidden:
        assert config_of(shape, "float32", {"model_type": files.model_type})["architectures"] == [name]
    elif name == "LlamaForCausalLM":
        assert config_of(shape, "float32")["architectures"] == ["MistralForCausalLM"]
    else:
        with pytest.raises(HpctrainError, match=r"model\.heads = 3: .* that divides model\.hidden = 26"):
            config_of(shape, "float32")


@pytest.mark.parametrize("name", [each.name for each in LANGUAGE_MODELS])
def test_a_model_with_a_small_vocabulary_has_no_padding_id(name: str) -> None:
    """Default ids of several classes are beyond the vocabulary, with which their models cannot be made."""
    files = ARCHITECTURES[name].files
    small = SMALL | ({"first_k_dense_replace": 1} if files.latent else {})
    if files.local_rope:
        del small["rope_parameters"]
    if name == "GPT2LMHeadModel":
        own_names = (own for own, _ in files.config_sizes.values())
        small = dict(zip(own_names, map(SMALL.get, ModelType.size_keys), strict=True))
    shape = shape_of({**small, "architectures": [name]}, "config.json")
    config = json.loads(model_files(shape, "float32", TokenizerSettings(), None)["config.json"])
    kind = getattr(transformers, *config.pop("architectures"))
    with no_warnings():
        model = kind(kind.config_class(**config))
    assert model.get_input_embeddings().padding_idx is None


def test_a_mistral_without_windows_is_exported_without_layer_types(tmp_path: Path) -> None:
    """Transformers reads a Mistral with layer_types as a Ministral, which must have a window."""
    imported = {
        **SMALL,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 4,
    }
    imported["layer_types"] = ["full_attention"] * SMALL["num_hidden_layers"]
    settings = TokenizerSettings({"config.json": imported})
    files = model_files(shape_of(imported, "config.json"), "float32", settings, None)
    (tmp_path / "config.json").write_text(files["config.json"])
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.sliding_window) == ("mistral", None)
    transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("name", "biases", "other_name"),
    [
        ("Ernie4_5ForCausalLM", ("all", False), "LlamaForCausalLM"),
        ("Ernie4_5ForCausalLM", ("none", True), "LlamaForCausalLM"),
        ("Starcoder2ForCausalLM", ("none", True), "GPTNeoXForCausalLM"),
        ("Starcoder2ForCausalLM", ("all", False), None),
    ],
)
def test_biases_that_one_key_cannot_say_are_those_of_another_architecture(
    name: str, biases: tuple[str, bool], other_name: str | None
) -> None:
    shape = shape_of({**SMALL, "architectures": [name]}, "config.json")
    imported = {"model_type": ARCHITECTURES[name].model_type}
    for both in (("all", True), ("none", False)):
        config = config_of(replace(shape, attention_bias=both[0], mlp_bias=both[1]), "float32", imported)
        assert config["architectures"] == [name] and config["use_bias"] == both[1]
    other = replace(shape, attention_bias=biases[0], mlp_bias=biases[1])
    if other_name is not None:
        assert config_of(other, "float32", imported)["architectures"] == [other_name]
        return
    message = (
        r"mlp_bias = false: .* the value of model\.attention_bias, since both have one key there \(use_bias"
    )
    with pytest.raises(HpctrainError, match=message):
        config_of(other, "float32", imported)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_scales_of_gemma_are_those_of_whole_numbers(name: str) -> None:
    shape = shape_of({**SMALL, "rope_parameters": None, "architectures": [name]}, "config.json")
    written = config_of(replace(shape, attention_scale=round(13**-0.5, 9)), "float32")
    assert written["query_pre_attn_scalar"] == 13
    keys = {key: written[key] for key in ("hidden_size", "num_attention_heads")}
    config_class = getattr(transformers, name).config_class
    assert config_class(**keys, query_pre_attn_scalar=13).query_pre_attn_scalar == 13
    with pytest.raises(REFUSED, match="query_pre_attn_scalar"):
        config_class(**keys, query_pre_attn_scalar=22.5)
    message = (
        r"attention_scale = 0\.21: .* requires 1 / sqrt\(n\) with an integer n, its query_pre_attn_scalar"
    )
    with pytest.raises(HpctrainError, match=message):
        config_of(replace(shape, attention_scale=0.21), "float32")


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_gemma_has_both_keys_of_the_activation_as_in_published_files(name: str) -> None:
    shape = shape_of({**SMALL, "rope_parameters": None, "architectures": [name]}, "config.json")
    written = config_of(shape, "float32")
    assert written["hidden_act"] == written["hidden_activation"] == "gelu_pytorch_tanh"


def test_heads_of_stablelm_have_the_width_that_other_sizes_give() -> None:
    config = {**deepcopy(SMALL), "architectures": ["StableLmForCausalLM"]}
    shape = shape_of(config, "config.json")
    model_config = transformers.StableLmConfig(**{**deepcopy(SMALL), "head_dim": 10, "num_hidden_layers": 1})
    with torch.device("meta"):
        model = transformers.StableLmForCausalLM(model_config)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (24, 24)
    with pytest.raises(HpctrainError, match="head_dim = 10: must be hidden_size / num_attention_heads"):
        shape_of({**config, "head_dim": 10}, "config.json")
    with pytest.raises(HpctrainError, match=r"head_size = 16: .* requires hidden / heads"):
        config_of(replace(shape, head_size=16), "float32")
