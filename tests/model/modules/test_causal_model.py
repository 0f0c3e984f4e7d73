"""Configurations of causal language models of `transformers`, and folders that are refused.

Tests of checkpoint/exchange/assembled_tensor.py, model/modules/config_problems.py,
model/modules/config_values.py and deck/families/computation_keys.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpctrain.checkpoint.exchange.by_name import find_name
from hpctrain.checkpoint.exchange.convert import import_model
from hpctrain.checkpoint.exchange.module_exchange import UNLIMITED_SEQUENCE
from hpctrain.checkpoint.exchange.module_tensors import (
    ModuleFolder,
    file_tensors,
    parameter_names,
    state_shapes,
)
from hpctrain.checkpoint.exchange.safetensors_folder import open_folder
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.comm.world import World
from hpctrain.deck.code import CAUSAL_MODEL
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.causal_model import build_causal_model, causal_model_keys
from hpctrain.model.modules.config_problems import config_problems
from hpctrain.train.start import start_from_source
from tests.causal_models import deck_of, tensors_of, tiny_model, trainer_of

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("helium").save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    return tmp_path / "theirs"


def change(folder: Path, **changes: Any) -> None:
    """Set keys of config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_determines_the_keys_of_a_module(folder: Path) -> None:
    deck = deck_of(folder)
    assert deck.model.module == CAUSAL_MODEL
    assert (deck.model.blocks, deck.model.plan) == ("model.layers.*", "its own")
    assert deck.model.vocabulary == 61
    assert deck_of(folder, "model.blocks=model.norm").model.blocks == "model.norm"
    config = json.loads((deck.model.arguments or {})["config"])
    assert config["model_type"] == "helium" and "dtype" not in config and "transformers_version" not in config
    with pytest.raises(HpctrainError, match=r"model\.layers = 3|model\.layers=3"):
        deck_of(folder, "model.layers=3")


def test_errors_of_keys_know_what_config_json_describes(tmp_path: Path) -> None:
    tiny_model("bloom").save_pretrained(tmp_path / "bloom")  # type: ignore[operator]
    with pytest.raises(HpctrainError, match=r"tensor=2: requires model.plan, .*no plan for this model"):
        deck_of(tmp_path / "bloom", "layout.tensor=2")
    with pytest.raises(HpctrainError, match=r"heads=8: has no effect with model.module \(leave it out\)"):
        deck_of(tmp_path / "bloom", "model.heads=8")


def test_both_generations_of_configurations_are_the_same_model() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "model_type": "helium"}
    older = {**sizes, "rope_theta": 123.0, "torch_dtype": "bfloat16"}
    newer = {**sizes, "rope_parameters": {"rope_type": "default", "rope_theta": 123.0}, "dtype": "bfloat16"}
    built = [build_causal_model({"config": json.dumps(each)}) for each in (older, newer)]
    frequencies = [dict(each.named_buffers())["model.rotary_emb.inv_freq"] for each in built]
    assert torch.equal(*frequencies) and frequencies[0][1] != 1
    assert {each.dtype for module in built for each in module.parameters()} == {torch.float32}
    linear = {"rope_type": "linear", "factor": 4.0}
    older = {**sizes, "rope_theta": 123.0, "rope_scaling": linear}
    newer = {**sizes, "rope_parameters": {**linear, "rope_theta": 123.0}}
    scaled = [build_causal_model({"config": json.dumps(each)}) for each in (older, newer)]
    frequencies += [dict(each.named_buffers())["model.rotary_emb.inv_freq"] for each in scaled]
    assert torch.equal(frequencies[2], frequencies[3])
    torch.testing.assert_close(frequencies[2], frequencies[0] / 4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"model_type": "nothing"}, "model_type = 'nothing': unknown to transformers"),
    "code": (
        {"model_type": "custom", "auto_map": {"AutoModelForCausalLM": "code.Model"}},
        r"model_type = 'custom': unknown to transformers .*, and code in the folder \(auto_map\) is not used",
    ),
    "masked": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        r"architectures = \['BertForMaskedLM'\], model_type = 'bert': unsupported architecture; expected "
        r"BertLMHeadModel, .*; to train it as a decoder, .*is_decoder=True",
    ),
    "encoder": (
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "num_hidden_layers": 1},
        "is_decoder = False: this BertLMHeadModel is an encoder, .*; to train it as a decoder, .*=True",
    ),
    "encoder without its class": (
        {"model_type": "roberta"},
        "is_decoder = False: this RobertaForCausalLM is an",
    ),
    "bidirectional values of other types": (
        {"model_type": "gemma4_text", "num_hidden_layers": 1, "use_bidirectional_attention": "all"},
        "is_causal = False: this Gemma4ForCausalLM is an encoder",
    ),
    "no positions after padding": (
        {"model_type": "roberta", "is_decoder": True, "num_hidden_layers": 1, "pad_token_id": -1},
        "pad_token_id = -1: positions of this model begin after this index, so none of its 512",
    ),
    "cross-attention": (
        {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        "add_cross_attention = True: attention to an encoder is unsupported; let transformers load it with",
    ),
    "bidirectional": (
        {"model_type": "helium", "num_hidden_layers": 1, "is_causal": False},
        "is_causal = False: this HeliumForCausalLM is an encoder, whose predictions depend on later tokens",
    ),
    "t5": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        "model_type = 't5': transformers .* has no causal language model of this type",
    ),
    "vision": (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
        r"vision_config: model_type = 'gemma3' is a model of images, audio or video, not of text; "
        r"use a folder of its language model alone \(Gemma3ForCausalLM\)",
    ),
    "permuted": ({"model_type": "xlnet", "n_layer": 1}, "attn_type = 'bi': this XLNetLMHeadModel is an enc"),
    "text part": (
        {"model_type": "mllama", "architectures": ["MllamaForConditionalGeneration"]},
        r"vision_config: model_type = 'mllama' is a model of images, .* alone \(MllamaForCausalLM\)",
    ),
    "part of a causal class": (
        {"model_type": "git", "architectures": ["GitForCausalLM"], "num_hidden_layers": 1},
        "vision_config: model_type = 'git' is a model of images, audio or video, not of text",
    ),
    "audio part": (
        {"model_type": "musicgen_decoder", "architectures": ["MusicgenForCausalLM"]},
        "model_type = 'musicgen_decoder': transformers .* has no causal language model of this type",
    ),
    "segments": ({"model_type": "cpmant"}, "model_type = 'cpmant': its predictions depend on later tokens"),
    "vision, whose class for text has the type": (
        {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]},
        r"vision_config: model_type = 'qwen3_5' is a model of images, .* \(Qwen3_5ForCausalLM\)",
    ),
    "vision and a language model of another type": (
        {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
        r"vision_config: model_type = 'mistral3' .* language model alone \(MistralForCausalLM\)",
    ),
    "vision without a language model of its own": (
        {"model_type": "git", "architectures": ["GitForCausalLM"]},
        "vision_config: model_type = 'git' is a model of images, audio or video, not of text$",
    ),
    "audio": (
        {"model_type": "phi4_multimodal", "architectures": ["Phi4MultimodalForCausalLM"]},
        "audio_config: model_type = 'phi4_multimodal' is a model of images, audio or video, not of text$",
    ),
    "quantized": (
        {"model_type": "helium", "quantization_config": {"bits": 4}},
        "quantization_config: quantized weights are unsupported",
    ),
    "type": (
        {"model_type": "helium", "hidden_size": "much"},
        "transformers cannot use this configuration: TypeError: Field 'hidden_size' expected int, got str",
    ),
    "size": (
        {"model_type": "opt", "vocab_size": 1, "pad_token_id": 1, "word_embed_proj_dim": 32},
        "transformers cannot build the model: vocab_size = 1, word_embed_proj_dim = 32: AssertionError: ",
    ),
    "no layers": ({"model_type": "bloom", "n_layer": 0}, "n_layer = 0: must be 1 or more"),
    "size 0": ({"model_type": "opt", "hidden_size": 0}, "hidden_size = 0: must be 1 or more"),
    "negative window": (
        {"model_type": "cwm", "sliding_window": -4},
        "sliding_window = -4: must not be negative",
    ),
    "many layers": (
        {"model_type": "opt", "num_hidden_layers": 10_000_000},
        "num_hidden_layers = 10000000: more than 10000 layers are unsupported",
    ),
    "nan": (
        {"model_type": "phimoe", "rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
        r"rope_parameters\.rope_theta = nan: must be a finite number",
    ),
    "base 0": ({"model_type": "helium", "rope_theta": 0}, "rope_theta = 0: must be above 0"),
    "experts": (
        {"model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 9},
        "num_experts_per_tok = 9: must be at most num_local_experts = 4",
    ),
    "dtype": (
        {"model_type": "opt", "dtype": "float7"},
        "dtype = 'float7': is no dtype of torch, such as 'bf",
    ),
    "factors": (
        {
            "model_type": "seed_oss",
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [1.0] * 4,
                "factor": 2.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
            },
        },
        r"rope_parameters\.short_factor: must have length 4, got 1",
    ),
    "layer types": (
        {"model_type": "gemma4_text", "num_hidden_layers": 2, "layer_types": ["foo", "full_attention"]},
        r"ValueError: The `layer_types` entries must be in \(.*\) but got .'foo',",
    ),
    "activation": (
        {"model_type": "seed_oss", "hidden_act": "silux"},
        r"hidden_act = 'silux': transformers has no activation of this name \(did you mean 'silu'\?\)",
    ),
    **{
        f"{table} of one kind": (
            {"model_type": "seed_oss", table: {"rope_type": "ntk", "factor": 2.0}},
            f"{table}: rope_type = 'ntk': unknown; expected 'default', 'linear', 'dynamic'",
        )
        for table in ("rope_scaling", "rope_parameters")
    },
    "rope of a layer type": (
        {"model_type": "gemma4_text", "rope_parameters": {"sliding_attention": {"rope_type": "ntk"}}},
        "rope_parameters: rope_type = 'ntk': unknown",
    ),
    **{
        f"{model_type} with {key}": (
            {"model_type": model_type, "num_hidden_layers": 2, key: value},
            f"{key} = .*: {model_type} models of transformers ignore this key, which changes what other",
        )
        for model_type, key, value in (
            ("helium", "sliding_window", 6),
            ("helium", "layer_types", ["sliding_attention", "full_attention"]),
            ("helium", "attn_logit_softcapping", 50.0),
            ("helium", "final_logit_softcapping", 30.0),
            ("helium", "logits_scaling", 8.0),
            ("helium", "partial_rotary_factor", 0.5),
            ("helium", "num_nextn_predict_layers", 1),
            ("helium", "use_bidirectional_attention", True),
            ("bloom", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
            ("bloom", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
            ("mamba", "sliding_window", 6),
        )
    },
    "nested partial rotation": (
        {"model_type": "helium", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5: helium models of transformers ignore this key",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_are_refused(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, told = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HpctrainError, match=told) as caught:
        read_source_keys(str(tmp_path))
    assert caught.value.exit_code == 2
    (problem,) = caught.value.problems
    assert problem.startswith(f"{tmp_path / 'config.json'}: ") and "site-packages" not in problem
    assert capfd.readouterr() == ("", "")  # no warnings of transformers or torch


NEUTRAL: dict[str, tuple[str, dict[str, Any]]] = {
    "values": (
        "helium",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "attn_logit_softcapping": 0,
            "logits_scaling": 1.0,
            "partial_rotary_factor": 1.0,
            "num_nextn_predict_layers": 0,
            "use_bidirectional_attention": False,
        },
    ),
    "unread key": ("phimoe", {"is_decoder": False}),
    "unused window": ("helium", {"sliding_window": 6, "use_sliding_window": False}),
    "rope": ("bloom", {"rope_scaling": {"rope_type": "default"}}),
    # The configuration or the code of these architectures has the key.
    "window": ("mistral", {"sliding_window": 6}),
    "scaling": ("helium", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "partial rotation": ("glm", {"partial_rotary_factor": 0.5}),
    "prediction modules": ("ernie4_5_moe", {"num_nextn_predict_layers": 1}),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_values_that_change_nothing_and_keys_that_an_architecture_has_are_accepted(name: str) -> None:
    kind, keys = NEUTRAL[name]
    config = json.loads(json.dumps(tiny_model(kind).config.to_dict()))  # type: ignore[union-attr, operator]
    assert causal_model_keys({**config, **keys}, "config.json")["model.module"] == CAUSAL_MODEL


@pytest.mark.parametrize("kind", ["bamba", "falcon_mamba", "glm4_moe", "inkling_text", "laguna", "minicpm3"])
def test_configurations_of_transformers_have_no_problems(kind: str) -> None:
    config_class = transformers.CONFIG_MAPPING[kind]
    model_class = transformers.AutoModelForCausalLM._model_mapping[config_class]
    assert not [*config_problems(config_class().to_dict(), [config_class, model_class])]


@pytest.mark.parametrize(("kind", "length"), [("roberta", 31), ("bert", 32), ("bart", 32)])
def test_a_sequence_is_as_long_as_the_positions_that_tokens_can_have(kind: str, length: int) -> None:
    model: Any = tiny_model(kind)
    keys = causal_model_keys(json.loads(json.dumps(model.config.to_dict())), "config.json")
    assert keys["batch.sequence"] == length
    model(input_ids=torch.ones(1, length, dtype=torch.int64), use_cache=False)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.ones(1, length + 1, dtype=torch.int64), use_cache=False)


def test_a_size_that_contradicts_the_files_is_one_sentence_with_its_key(folder: Path, world: World) -> None:
    change(folder, intermediate_size=64)
    deck = deck_of(folder)
    engine = build_engine(deck, world, make_mesh(deck, world))
    with pytest.raises(HpctrainError) as caught:
        start_from_source(deck, engine)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{folder / 'model.safetensors'}: model.layers.0.mlp.")
    assert problem.endswith("requires [64, 32] (intermediate_size = 64 in config.json) (and 5 more differ)")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_half_of_the_shards(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20kB")
    min(folder.glob("model-0000[2-9]*.safetensors")).unlink()


def with_integers(folder: Path) -> None:
    tensors = tensors_of(folder)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")


def with_biases(folder: Path) -> None:
    tensors = tensors_of(folder)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    save_file(tensors, folder / "model.safetensors")


DAMAGED: dict[Callable[[Path], object], tuple[int, str]] = {
    without_weights: (2, "contains no weights"),
    pickled: (2, "weights in a pickle can run code and are not read"),
    with_integers: (2, "model.norm.weight: has type I8, expected F32, BF16, F16 or F64"),
    with_half_of_the_shards: (3, "no such file, though model.safetensors.index.json names it"),
    lambda folder: change(folder, hidden_size=64): (
        2,
        r"has shape \[.*, but the module requires \[.* \(hidden_size = 64 in config.json\)",
    ),
    lambda folder: change(folder, num_attention_heads=12): (
        2,
        r"the module requires \[.* \(num_attention_heads \* head_dim = 96 in config.json\)",
    ),
    lambda folder: change(folder, num_key_value_heads=1): (
        2,
        r"the module requires \[.* num_key_value_heads \* head_dim = 8 in config.json\)",
    ),
    lambda folder: change(folder, attention_bias=True): (
        2,
        r"has no .*q_proj.bias, which the module requires \(attention_bias = True in config.json\)",
    ),
    lambda folder: change(folder, tie_word_embeddings=True): (2, "set tie_word_embeddings to false"),
    with_biases: (
        2,
        r"bias: in this file, but not in the model of config.json, where attention_bias = False",
    ),
    lambda folder: change(folder, num_hidden_layers=3): (
        2,
        r"has no model.layers.2.*, which the module requires \(num_hidden_layers = 3 in config.json\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_folders_that_are_refused(
    damage: Callable[[Path], object], folder: Path, world: World, tmp_path: Path
) -> None:
    damage(folder)
    code, told = DAMAGED[damage]
    with pytest.raises(HpctrainError, match=told) as caught:
        import_model(world, folder, tmp_path / "model.h5")
    assert caught.value.exit_code == code
    assert not (tmp_path / "model.h5").exists()


def test_code_that_a_folder_names_is_dropped_for_a_model_of_transformers(folder: Path) -> None:
    keys = read_source_keys(str(folder))
    change(folder, auto_map={"AutoModelForCausalLM": "code.Model"}, attn_implementation="someone/kernels")
    (folder / "code.py").write_text("raise SystemExit")
    assert read_source_keys(str(folder)) == keys


def boxes(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield all of a tensor, and boxes inside it."""
    yield (0,) * len(shape), shape
    yield tuple(each // 2 for each in shape), tuple(each - each // 2 for each in shape)
    yield (0,) * len(shape), tuple(-(-each // 2) for each in shape)


@pytest.mark.parametrize(
    "kind",
    [
        *("glm4_moe", "olmo_hybrid", "granitemoeshared", "gpt_neox"),
        "camembert",  # whose head, which is tied to the embedding, comes first
    ],
)
def test_tensors_of_files_and_of_modules_are_boxes_of_each_other(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    with torch.device("meta"):
        module = build_causal_model({"config": str(tmp_path)})
    view, state = ModuleFolder(open_folder(tmp_path), module), model.state_dict()
    aliases = parameter_names(module)
    for name in state_shapes(module):
        own = name.split("/", 2)[2]
        stored_name = find_name(aliases.get(own, [own]), view) or own
        for start, shape in boxes(tuple(state[own].shape)):
            inside = tuple(slice(first, first + extent) for first, extent in zip(start, shape, strict=True))
            assert torch.equal(view.read(stored_name, start, shape), state[own][inside]), own
    files = file_tensors(module, state_shapes(module))
    stored = tensors_of(tmp_path)
    assert files.keys() == stored.keys()

    def read(dataset: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        inside = tuple(slice(first, first + extent) for first, extent in zip(start, shape, strict=True))
        return state[dataset.split("/", 2)[2]][inside]

    for name, each in files.items():
        assert torch.equal(each.read((0,) * len(each.shape), each.shape, read), stored[name]), name


def test_a_model_that_cannot_compute_is_one_sentence_with_its_key(world: World, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    tiny_model("mpt").save_pretrained(theirs)  # type: ignore[operator]
    change(theirs, n_heads=5)
    with pytest.raises(HpctrainError) as caught:
        import_model(world, theirs, tmp_path / "model.h5")
    (problem,) = caught.value.problems
    assert "cannot run the model: n_heads = 5: RuntimeError: shape '[1, 16, 5, 6]' is invalid for" in problem
    change(theirs, n_heads=4, max_seq_len=8)
    training = trainer_of(world, deck_of(theirs))
    with pytest.raises(HpctrainError) as caught:
        training.train(1)
    (problem,) = caught.value.problems
    assert "fails with tokens of shape [2, 16] (more than max_seq_len = 8): RuntimeError: The size" in problem


def test_a_deck_does_not_need_the_folder_for_its_module(folder: Path) -> None:
    keys = causal_model_keys(json.loads((folder / "config.json").read_text()), "config.json")
    shutil.rmtree(folder)
    assert build_causal_model(keys["model.arguments"])  # type: ignore[arg-type]


def test_an_output_layer_that_differs_from_the_embedding_is_not_tied_to_it(
    folder: Path, world: World, tmp_path: Path
) -> None:
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    change(folder, tie_word_embeddings=True)
    import_model(world, folder, tmp_path / "model.h5")
    deck = deck_of(folder)
    start_from_source(deck, build_engine(deck, world, make_mesh(deck, world)))
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / "model.safetensors")
    told = (
        "lm_head.weight: differs from model.embed_tokens.weight, .*; set tie_word_embeddings to false in conf"
    )
    with pytest.raises(HpctrainError, match=told):
        import_model(world, folder, tmp_path / "other.h5")
    with pytest.raises(HpctrainError, match=told):
        start_from_source(deck, build_engine(deck, world, make_mesh(deck, world)))


def test_tensors_that_the_model_does_not_have_are_refused_and_those_that_it_ignores_are_named(
    folder: Path, world: World, tmp_path: Path
) -> None:
    tensors = tensors_of(folder)
    names = ["model.layers.0.attn.bias", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    ignored = {name: torch.ones(4) for name in names}
    save_file({**tensors, **ignored}, folder / "model.safetensors")
    told = f"2 tensors without a counterpart ignored ({', '.join(names)})"
    assert told in import_model(world, folder, tmp_path / "model.h5")
    deck = deck_of(folder)
    assert told in start_from_source(deck, build_engine(deck, world, make_mesh(deck, world)))
    change(folder, num_hidden_layers=1)
    told = (
        r"layers\.1\..*: in this file, but .*, where num_hidden_layers = 1, but the files have 2 \(and 8 more"
    )
    with pytest.raises(HpctrainError, match=told):
        import_model(world, folder, tmp_path / "other.h5")
    deck = deck_of(folder)
    with pytest.raises(HpctrainError, match=told):
        start_from_source(deck, build_engine(deck, world, make_mesh(deck, world)))
    change(folder, num_hidden_layers=2)
    save_file({**tensors, "more": torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(
        HpctrainError, match=r"model.safetensors: more: in this file, but not in the model of con"
    ):
        import_model(world, folder, tmp_path / "other.h5")


def test_two_tensors_for_one_of_the_model_are_refused(folder: Path, world: World, tmp_path: Path) -> None:
    tensors = tensors_of(folder)
    save_file(
        {**tensors, "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
    )
    told = r"embed_tokens\.weight and model\.embed_tokens\.weight: both are in the files, for one tensor"
    with pytest.raises(HpctrainError, match=told):
        import_model(world, folder, tmp_path / "model.h5")


def test_a_model_without_a_longest_sequence_gets_one_in_its_checkpoint(world: World, tmp_path: Path) -> None:
    tiny_model("bloom").save_pretrained(tmp_path / "bloom")  # type: ignore[operator]
    told = import_model(world, tmp_path / "bloom", tmp_path / "model.h5")
    assert f"so that of the checkpoint is {UNLIMITED_SEQUENCE} tokens" in told
    deck = stored_deck(read_state(tmp_path / "model.h5"), tmp_path)
    assert deck.batch.sequence == UNLIMITED_SEQUENCE


def test_positions_as_many_as_tokens_are_told_from_them() -> None:
    config = tiny_model("roberta").config.to_dict()  # type: ignore[operator,union-attr]
    config["vocab_size"] = config["max_position_embeddings"]
    assert causal_model_keys(json.loads(json.dumps(config)), "config.json")["batch.sequence"] == 31
