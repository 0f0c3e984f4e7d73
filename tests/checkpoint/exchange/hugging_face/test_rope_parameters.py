"""Rotary positions of config.json: both generations of files, published ones, and what is refused."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.exchange.hugging_face.architectures import ARCHITECTURES, LANGUAGE_MODELS
from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.hugging_face.config_writer import config_of
from hpctrain.checkpoint.exchange.model_files import context_length
from hpctrain.checkpoint.exchange.source import model_keys
from hpctrain.data.tokenizer_settings import TokenizerSettings
from hpctrain.deck.sections.rope_scaling import RopeScaling
from hpctrain.errors import HpctrainError
from hpctrain.model.attention.rotary import RotaryFrequencies
from tests.rope_scalings import SCALINGS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "rope_theta": 500000.0,
}
LLAMA_3_1 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 12}


def read(scaling: dict[str, Any] | None, **keys: Any) -> RopeScaling | None:
    return shape_of({**LLAMA, "rope_scaling": scaling, **keys}, "config.json").rope_scaling


def test_both_generations_are_read() -> None:
    expected = RopeScaling(
        kind="llama3",
        factor=8.0,
        original_sequence=8192,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
    )
    long = {"max_position_embeddings": 131072}
    new = {"rope_parameters": {**LLAMA_3_1, "rope_theta": 7.0}}
    assert read(LLAMA_3_1, **long) == expected
    shape = shape_of({**LLAMA, **long, **new}, "config.json")
    assert (shape.rope_scaling, shape.rope_base) == (expected, 7.0)
    assert shape_of({**LLAMA, **long, "rope_parameters": LLAMA_3_1}, "config.json").rope_base == 500000.0
    assert read(LLAMA_3_1, **long, rope_parameters={**LLAMA_3_1, "rope_theta": 500000.0}) == expected
    assert read({"type": "linear", "factor": 2}) == RopeScaling(kind="linear", factor=2.0)
    assert read({"type": "default"}) is None and read({}) is None and read(None) is None


@pytest.mark.parametrize(
    ("scaling", "keys", "expected"),
    [
        ({"type": "dynamic", "factor": 2.0}, {}, {"factor": 2.0, "original_sequence": 48}),
        ({"type": "yarn", "factor": 4.0}, {}, {"factor": 4.0, "original_sequence": 48}),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 16}, {}, {"factor": 3.0}),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 49}, {}, {"factor": 2.0}),
        (
            {"type": "yarn", **YARN, "beta_fast": None, "beta_slow": 0},
            {},
            {"beta_fast": 32, "beta_slow": 1},
        ),
        ({"type": "yarn", **YARN, "truncate": None}, {}, {"truncate": False}),
        ({"type": "yarn", **YARN}, {}, {"truncate": True}),
        (
            {"type": "yarn", **YARN, "mscale": 2.0, "mscale_all_dim": 0.5},
            {},
            {"attention_factor": (0.2 * log(4) + 1) / (0.05 * log(4) + 1)},
        ),
        ({"type": "yarn", **YARN, "mscale": 2.0, "mscale_all_dim": 0}, {}, {"attention_factor": None}),
        (
            {"type": "longrope", "short_factor": [1] * 4, "long_factor": [2, 3, 4, 5]},
            {"original_max_position_embeddings": 16},
            {"factor": 3.0, "original_sequence": 16, "long_factors": (2.0, 3.0, 4.0, 5.0)},
        ),
    ],
)
def test_derived_values_are_those_of_transformers(
    scaling: dict[str, Any], keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = read(scaling, **keys)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("scaling", "keys", "told"),
    [
        (
            {"type": "ntk", "factor": 2.0},
            {},
            "rope_scaling: rope_type = 'ntk': unsupported; expected 'default'",
        ),
        ({"type": ["yarn"]}, {}, "rope_scaling: rope_type = ['yarn']: unsupported"),
        (
            {"rope_type": None, "type": "linear", "factor": 2.0},
            {},
            "rope_scaling: rope_type = None: unsupported; expected 'default'",
        ),
        ({"type": "yarn", **YARN, "mscale": "1"}, {}, "rope_scaling: mscale = '1': must be a number of at"),
        (
            {"type": "yarn", **YARN, "mscale_all_dim": -1.0, "mscale": 1},
            {},
            "rope_scaling: mscale_all_dim = -1.0: must be a number of at least 0",
        ),
        ("yarn", {}, "rope_scaling = 'yarn': must be an object"),
        ({"type": "linear"}, {}, "requires factor with rope_type = 'linear'"),
        ({"type": "linear", "factor": -2.0}, {}, "factor = -2.0: must be a number from 1 to 1000000"),
        ({"type": "linear", "factor": "2"}, {}, "rope_scaling: factor = '2': must be a number from 1 to"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3}, {}, "beta_fast = 3: unsupported with rope_type"),
        (
            {"type": "linear", "factor": 2.0, "surprise": 3},
            {},
            "rope_scaling: surprise = 3: unsupported",
        ),
        ({"type": "linear", "factor": 2.0, "rope_theta": 0}, {}, "rope_theta = 0: must be a number above 0"),
        (
            {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5},
            {},
            "partial_rotary_factor = 0.5",
        ),
        ({"type": "yarn"}, {}, "requires factor with rope_type = 'yarn'"),
        (
            {"type": "yarn", "factor": None, "original_max_position_embeddings": 49},
            {},
            "factor = None: requires max_position_embeddings of at least original_max_position_embeddings",
        ),
        ({"type": "llama3", "factor": 2.0}, {}, "requires low_freq_factor with rope_type = 'llama3'"),
        (
            {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4},
            {},
            "config.json: rope_scaling: low_freq_factor = 4.0: must be below high_freq_factor = 4",
        ),
        (
            {"type": "yarn", **YARN, "beta_slow": 33},
            {},
            "config.json: rope_scaling: beta_slow = 33.0: must be at most beta_fast = 32",
        ),
        (
            {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
            {},
            "original_max_position_embeddings = 16: must be max_position_embeddings = 48 with rope_type",
        ),
        ({"type": "linear", "factor": 2.0, "rope_theta": None}, {}, "rope_scaling: rope_theta = None: must"),
        (None, {"rope_parameters": 0}, "rope_parameters = 0: must be an object"),
        (
            {"type": "yarn", **YARN},
            {"rope_theta": 1.0},
            "rope_type = 'yarn': requires a base above 1",
        ),
        ({"type": "yarn", **YARN, "truncate": 1}, {}, "rope_scaling: truncate = 1: must be true or false"),
        (
            {"type": "longrope", "factor": 2, "short_factor": [1, 2], "long_factor": [1, 2, 3, 4]},
            {},
            "short_factor = (1.0, 2.0): must have 4 numbers, half of the head size, but it has 2",
        ),
        (
            {"type": "longrope", "factor": 2, "short_factor": [1, 2, 3, 0], "long_factor": [1, 2, 3, 4]},
            {},
            "must have numbers above 0",
        ),
        ({"type": "longrope", "factor": 2, "short_factor": [1, 2, 3, 4]}, {}, "requires long_factor with"),
        (
            {"type": "linear", "factor": 2.0},
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
            "contradicts rope_parameters",
        ),
        (None, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: llama models of transformers"),
        (
            {"type": "yarn", **YARN, "attention_factor": 1.0, "mscale_all_dim": 0.5},
            {"rope_parameters": {"type": "yarn", **YARN, "attention_factor": 1.0, "mscale_all_dim": 0.6}},
            "contradicts rope_parameters",
        ),
    ],
)
def test_configs_that_are_refused(scaling: Any, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        read(scaling, **keys)
    assert caught.value.exit_code == 2
    assert told in str(caught.value), caught.value


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.rotary])
def test_a_share_of_rotated_features_is_read_or_refused(name: str) -> None:
    config = {"architectures": [name], "id2label": {"0": "LABEL_0"}, "num_experts_per_tok": 1}
    if ARCHITECTURES[name].has_rotary_fraction:
        key = ARCHITECTURES[name].files.rope_keys[1]
        assert shape_of({**config, key: 0.5}, "config.json").rotary_fraction == 0.5
        return
    assert shape_of({**config, "partial_rotary_factor": 1.0}, "config.json").rotary_fraction == 1
    with pytest.raises(HpctrainError, match=r"partial_rotary_factor = 0\.5: .* models of transformers"):
        shape_of({**config, "partial_rotary_factor": 0.5}, "config.json")


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"rope_theta": 300.0},
            "rope_theta = 300.0: ignored by transformers, which computes with 10000",
        ),
        ({"partial_rotary_factor": 0.5, "rotary_pct": 0.75}, "which computes with 0.75 here; set rotary_pct"),
        (
            {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}},
            "'factor': 2.0}: contradicts rope_parameters",
        ),
        ({"rope_theta": 300.0, "rotary_emb_base": 300.0, "rope_scaling": LINEAR}, ""),
        ({"rotary_pct": 0.5, "rope_parameters": {"rope_theta": 300.0}}, ""),
        ({"rotary_emb_base": 50.0, "rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}}, ""),
    ],
)
def test_positions_of_neox_are_those_of_transformers(keys: dict[str, Any], told: str) -> None:
    config = {"architectures": ["GPTNeoXForCausalLM"], "hidden_size": 48, "num_attention_heads": 6, **keys}
    if told:
        with pytest.raises(HpctrainError) as caught:
            shape_of(config, "config.json")
        assert told in str(caught.value), caught.value
        return
    transformers = pytest.importorskip("transformers")
    shape = shape_of(config, "config.json")
    for each in (config, config_of(shape, "float32")):
        parameters = transformers.GPTNeoXConfig(**deepcopy(each)).rope_parameters
        found = parameters["rope_theta"], parameters["partial_rotary_factor"], parameters.get("factor")
        factor = None if shape.rope_scaling is None else shape.rope_scaling.factor
        assert found == (shape.rope_base, shape.rotary_fraction, factor)


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        (
            "Gemma3",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": LINEAR}},
            "rope_parameters: sliding_attention = {'rope_type': 'linear', 'factor': 2.0}: unsupp",
        ),
        *(
            (name, {"rope_parameters": LINEAR}, "'factor': 2.0}: must have an object for each of 'full_att")
            for name in ("Gemma3", "Olmo3")
        ),
        (
            "Olmo3",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN, "truncate": False}}},
            "config.json: truncate = False: unsupported; expected True for olmo3",
        ),
        ("Olmo3", {"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False}}, "truncate = False: un"),
        (
            "Olmo3",
            {"rope_scaling": {"type": "yarn", **YARN}},
            "rope_scaling: type = 'yarn': ignored by transf",
        ),
        (
            "Gemma3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "for gemma3_text; use its newer name rope_type",
        ),
        (
            "Olmo3",
            {"rope_parameters": {"full_attention": {"rope_theta": 300.0}, "truncate": False}},
            "truncate = False: unsupported",
        ),
        ("Olmo3", {"rope_theta": 1e4}, "rope_theta = 10000.0: ambiguous; set rope_theta in rope_parameters"),
        ("Olmo3", {"rope_local_base_freq": 1e4}, "rope_local_base_freq = 10000.0: ambiguous; set"),
        (
            "Olmo3",
            {"rope_theta": 1e4, "rope_parameters": {"full_attention": {"rope_theta": 7.0}}},
            "rope_theta = 10000.0: ambiguous; set",
        ),
    ],
)
def test_positions_of_layers_with_windows_that_are_refused(
    name: str, keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(HpctrainError) as caught:
        shape_of({"architectures": [f"{name}ForCausalLM"], **keys}, "config.json")
    assert told in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("Gemma3Text", {}),
        ("Gemma3Text", {"rope_theta": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("Gemma3Text", {"rope_theta": 300.0, "rope_local_base_freq": 40.0}),
        ("Gemma3Text", {"rope_scaling": {"type": "default"}}),
        ("Gemma3Text", {"rope_parameters": {"full_attention": {"rope_theta": 300.0}}}),
        ("Olmo3", {"rope_theta": 500_000.0}),
        ("Olmo3", {"rope_parameters": {"full_attention": {"rope_theta": 300.0}}}),
        ("Olmo3", {"rope_parameters": {"sliding_attention": {"rope_theta": 40.0}}}),
    ],
)
def test_bases_of_layers_with_windows_are_those_of_transformers(name: str, keys: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    tables = getattr(transformers, f"{name}Config")(**deepcopy(keys)).rope_parameters
    architectures = [f"{name.removesuffix('Text')}ForCausalLM"]
    shape = shape_of({"architectures": architectures, **keys}, "config.json")
    assert shape.rope_base == tables["full_attention"]["rope_theta"]
    local = shape.rope_base if shape.rope_local_base is None else shape.rope_local_base
    assert local == tables["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize("name", SCALINGS)
def test_config_says_what_was_read(name: str) -> None:
    scaling = SCALINGS[name]
    shape = shape_of({**LLAMA, "max_position_embeddings": 48}, "config.json")
    is_dynamic = name == "dynamic"
    shape = replace(shape, rope_scaling=scaling, sequence=30 if is_dynamic else 48)  # factor x original
    # An export writes the length without scaling (`context_length`).
    config = config_of(shape, "float32") | {"max_position_embeddings": 12 if is_dynamic else 48}
    assert shape_of(config, "config.json") == shape
    assert shape_of({**config, "rope_scaling": None}, "config.json") == shape
    assert shape_of({**config, "rope_parameters": None}, "config.json") == shape
    keys = {key: value for key, value in model_keys(shape).items() if key.startswith("rope_scaling.")}
    assert keys["rope_scaling.kind"] == scaling.kind
    assert ("rope_scaling.beta_fast" in keys) == (scaling.kind == "yarn")


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("name", [each.name for each in LANGUAGE_MODELS if each.rotary])
def test_transformers_rotates_a_model_that_was_not_imported_as_the_deck_says(name: str, kind: str) -> None:
    transformers, utils = (
        pytest.importorskip(each) for each in ("transformers", "transformers.modeling_rope_utils")
    )
    files = ARCHITECTURES[name].files
    if files.latent or files.local_rope:
        pytest.skip("its scaling has other keys or other tables")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    sizes["num_experts_per_tok"] = 1
    shape = shape_of({**sizes, "architectures": [name], "max_position_embeddings": 48}, "config.json")
    if shape.rotated_features != 8 and kind in {"longrope", "dynamic"}:
        pytest.skip("it needs more features")
    scaling = SCALINGS[kind].model_copy(update={"truncate": True})
    shape = replace(shape, rope_scaling=scaling)
    config = config_of(shape, "float32")
    config["max_position_embeddings"] = 12 if kind == "dynamic" else 48
    theirs = getattr(transformers, *config.pop("architectures")).config_class(**config)
    frequencies, factor = utils.ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](
        theirs, torch.device("cpu"), 48
    )
    ours = RotaryFrequencies.of(shape)
    torch.testing.assert_close(ours.angles_per_position(torch.device("cpu")).float(), frequencies)
    assert factor == pytest.approx(ours.attention_factor)


@pytest.mark.parametrize(
    ("name", "sequence", "imported", "expected"),
    [
        ("linear", 8, 0, 8),
        ("dynamic", 24, 0, 12),
        ("llama3", 8, 0, 128),
        ("llama3", 8, 24, 24),
        ("yarn", 8, 0, 48),
        ("yarn", 24, 12, 48),
        ("yarn", 100, 0, 100),
        ("longrope", 24, 0, 24),
    ],
)
def test_context_length_fits_the_scaling(name: str, sequence: int, imported: int, expected: int) -> None:
    shape = shape_of({**LLAMA, "max_position_embeddings": sequence}, "config.json")
    shape = type(shape)(**{**vars(shape), "rope_scaling": SCALINGS[name]})
    settings = TokenizerSettings(context=imported)
    assert context_length(shape, ARCHITECTURES["LlamaForCausalLM"], settings) == expected


def test_bounds_that_are_not_truncated_are_exported_where_transformers_reads_them() -> None:
    scaling = RopeScaling(kind="yarn", factor=4.0, original_sequence=12, truncate=False)
    config = {"architectures": ["Olmo3ForCausalLM"], "max_position_embeddings": 48}
    shape = replace(shape_of(config, "config.json"), rope_scaling=scaling)
    message = r"model\.rope_scaling\.truncate = false: the Olmo3ForCausalLM of transformers ignores it"
    with pytest.raises(HpctrainError, match=message):
        config_of(shape, "float32")
    truncated = scaling.model_copy(update={"truncate": True})
    assert config_of(replace(shape, rope_scaling=truncated), "float32")["architectures"] == [
        "Olmo3ForCausalLM"
    ]


@pytest.mark.parametrize("name", SCALINGS)
def test_phi3_has_the_kinds_that_transformers_takes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    refused = pytest.importorskip("huggingface_hub.errors").StrictDataclassError
    scaling = SCALINGS[name]
    config = {"architectures": ["Phi3ForCausalLM"], "hidden_size": 32, "num_attention_heads": 4}
    length = 30 if name == "dynamic" else 48
    shape = replace(shape_of(config, "config.json"), rope_scaling=scaling, sequence=length)
    written = config_of(shape, "float32")
    parameters = {**written["rope_parameters"], "partial_rotary_factor": 1.0}
    keys = {**config, "max_position_embeddings": 48, "rope_parameters": parameters}
    if name == "longrope":
        assert written["architectures"] == ["Phi3ForCausalLM"]
        message = r"original_max_position_embeddings = 12: ignored by transformers, .* with 4096 here"
        with pytest.raises(HpctrainError, match=message):
            shape_of(keys, "config.json")
        theirs = transformers.Phi3Config(**deepcopy(keys)).rope_parameters
        assert (theirs["rope_type"], theirs["original_max_position_embeddings"]) == (name, 4096)
        keys["original_max_position_embeddings"] = written["original_max_position_embeddings"]
        assert shape_of(keys, "config.json").rope_scaling == scaling
        other = replace(shape, head_size=10, windows=(5,), rotary_fraction=0.8)
        with pytest.raises(HpctrainError, match=r"head_size = 10: .* requires hidden / heads if positions"):
            config_of(other, "float32")
        return
    assert written["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises((refused, KeyError)):
        transformers.Phi3ForCausalLM(transformers.Phi3Config(**deepcopy(keys), num_hidden_layers=1))
    told = f"rope_parameters: rope_type = '{scaling.kind}': unsupported; expected 'longrope' for phi3"
    with pytest.raises(HpctrainError) as caught:
        shape_of(keys, "config.json")
    assert told in str(caught.value)
