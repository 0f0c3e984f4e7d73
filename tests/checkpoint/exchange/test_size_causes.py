"""The keys of a config.json that a message names where they contradict the tensors of a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.exchange import size_causes
from hpctrain.checkpoint.exchange.convert import import_model
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from tests.causal_models import tensors_of
from tests.checkpoint.exchange.test_families import reference

pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file


@pytest.mark.parametrize(
    ("key", "change", "cause"),
    [
        ("num_experts", 1, "num_experts = {}, but the files have"),
        ("moe_intermediate_size", 10, "moe_intermediate_size = {}"),
        ("intermediate_size", 8, "intermediate_size = {}"),
    ],
)
def test_the_key_of_a_wrong_size_is_named(
    key: str, change: int, cause: str, world: World, tmp_path: Path
) -> None:
    reference("llama-qwen2-moe", mlp_only_layers=[0]).save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    config[key] += change
    path.write_text(json.dumps(config))
    with pytest.raises(HpctrainError) as caught:
        import_model(world, tmp_path / "model", tmp_path / "model.h5")
    assert any(cause.format(config[key]) in each for each in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("name", "key", "value", "cause"),
    [
        ("llama", "attention_bias", False, ", where attention_bias = False"),
        ("llama", "mlp_bias", True, ", where mlp_bias = True"),
        ("llama", "head_dim", 16, ", where head_dim = 16 (10 would fit)"),
        ("llama", "head_dim", None, ", where head_dim is missing and 6 by default (10 would fit)"),
        (
            "llama",
            "attention_bias",
            None,
            ", where attention_bias is missing and False by default (True would",
        ),
        ("olmo", "num_attention_heads", 2, ", where num_attention_heads = 2 (6 would fit)"),
        (
            "olmo",
            "num_attention_heads",
            18,
            ", where num_attention_heads = 18 (6 would fit) or num_key_value",
        ),
        ("llama-qwen3-moe", "num_local_experts", 8, ", where num_local_experts = 8, but the files have 4"),
        ("gpt-oss", "num_attention_heads", 12, ".sinks: has shape [6], expected [12] by config.json, where"),
        (
            "phi3",
            "intermediate_size",
            40,
            "gate_up_proj.weight: has shape [88, 36], expected [80, 36] by config.json, where inter",
        ),
        (
            "phi3",
            "num_attention_heads",
            2,
            ", where num_attention_heads = 2 (6 would fit)",
        ),
        ("gemma", "tie_word_embeddings", False, ", where tie_word_embeddings = False"),
        ("olmo-tied", "tie_word_embeddings", None, ", where tie_word_embeddings is missing and False by"),
        ("stablelm", "use_parallel_residual", True, ", where use_parallel_residual = True"),
        ("starcoder2", "use_bias", False, ", where use_bias = False (True would fit)"),
        ("neox", "tie_word_embeddings", True, ", where tie_word_embeddings = True (False would fit)"),
        ("llama-qwen2-moe", "decoder_sparse_step", 2, ", where decoder_sparse_step = 2 (1 would fit)"),
        (
            "llama-qwen2-moe",
            "shared_expert_intermediate_size",
            120,
            ", where shared_expert_intermediate_size = 120 (60 would fit)",
        ),
        ("llama-qwen2-moe", "mlp_only_layers", [0], ", where mlp_only_layers = [0] ([] would fit)"),
        ("deepseek-v2", "first_k_dense_replace", 0, ", where first_k_dense_replace = 0 (1 would fit)"),
        ("deepseek-v2", "n_shared_experts", 3, ", where n_shared_experts = 3 (2 would fit)"),
        (
            "deepseek-v3",
            "n_shared_experts",
            None,
            ", where n_shared_experts is missing and 1 by default (2 w",
        ),
        ("deepseek-v2", "first_k_dense_replace", None, ", where first_k_dense_replace is missing and 0 by"),
        (
            "deepseek-v2",
            "num_hidden_layers",
            None,
            ": num_hidden_layers is missing and 32 by default, n_rout",
        ),
        ("deepseek-v2", "v_head_dim", 4, ", where v_head_dim = 4 (5 would fit)"),
        ("deepseek-v2", "qk_nope_head_dim", 16, ", where qk_nope_head_dim = 16 (8 would fit)"),
        ("deepseek-v2-lite", "q_lora_rank", 7, ", where q_lora_rank = 7 (None would fit)"),
        ("deepseek-v2", "q_lora_rank", 7, ", where q_lora_rank = 7 (14 would fit)"),
    ],
)
def test_the_key_that_switches_tensors_on_is_named(
    name: str, key: str, value: object, cause: str, world: World, tmp_path: Path
) -> None:
    reference(name).save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = {**json.loads(path.read_text()), key: value}
    path.write_text(json.dumps({each: its for each, its in config.items() if its is not None}))
    with pytest.raises(HpctrainError) as caught:
        import_model(world, tmp_path / "model", tmp_path / "model.h5")
    assert cause in caught.value.problems[0]


@pytest.mark.parametrize(
    ("name", "key", "value", "cause"),
    [
        ("gpt-oss", "num_hidden_layers", 4, "for each layer, where num_hidden_layers = 4"),
        ("smollm3", "num_hidden_layers", 4, "for each layer, where num_hidden_layers = 4"),
        ("phi3-partial", "hidden_size", 96, "it has 3, where hidden_size = 96 and num_attention_heads = 6"),
        ("glm4", "head_dim", 6, "must give an even number of features, where head_dim = 6"),
        ("olmo2", "hidden_size", 18, "must result in an even head size, where hidden_size = 18"),
        ("deepseek-v2", "num_experts_per_tok", 6, "num_experts_per_tok = 6 of n_routed_experts = 6 experts"),
        ("deepseek-v2", "num_hidden_layers", 1, "leaves no layer with experts, where num_hidden_layers = 1"),
        ("llama-mixtral", "num_experts_per_tok", None, "num_experts_per_tok = None: must be the number of"),
        ("llama-qwen3-moe", "num_local_experts", 0, ": num_local_experts = 0: must be a whole number"),
        ("llama-qwen2-moe-listed", "num_hidden_layers", 1, "from 0 to 0, where num_hidden_layers = 1"),
    ],
)
def test_a_size_that_contradicts_another_key_is_named(
    name: str, key: str, value: object, cause: str, world: World, tmp_path: Path
) -> None:
    reference(name).save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(HpctrainError) as caught:
        import_model(world, tmp_path / "model", tmp_path / "model.h5")
    assert any(cause in each for each in caught.value.problems), caught.value.problems


def test_the_search_tries_the_first_layer_of_many(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_causes, "_LARGEST_SEARCH", 6000)  # 12 times the tensors of all layers
    reference("llama", num_hidden_layers=30).save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": 14}))
    with pytest.raises(HpctrainError, match=r"head_dim = 14 \(10 would fit\)"):
        import_model(world, tmp_path / "model", tmp_path / "model.h5")


def test_two_wrong_keys_are_named_together(world: World, tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": None, "vocab_size": 70}))
    with pytest.raises(HpctrainError) as caught:
        import_model(world, tmp_path / "model", tmp_path / "model.h5")
    assert "vocab_size = 70 (61 would fit)" in caught.value.problems[0]
    assert " and " in caught.value.problems[0].partition(", where ")[2]
    assert "head_dim is null and 6 by default (10 would fit)" in caught.value.problems[0]


def test_a_wrong_key_is_named_beside_a_missing_tensor(world: World, tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path / "model")
    tensors = tensors_of(tmp_path / "model")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model/model.safetensors")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 40}))
    with pytest.raises(HpctrainError, match=r"gate_proj.* intermediate_size = 40 \(44 would fit\)"):
        import_model(world, tmp_path / "model", tmp_path / "model.h5")


def test_no_key_is_blamed_for_a_wrong_architecture(world: World, tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **mixtral}))
    with pytest.raises(HpctrainError, match=r"gate\.weight: not in these files") as caught:
        import_model(world, tmp_path / "model", tmp_path / "model.h5")
    assert ", where" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [lambda each: each.to(torch.int8), torch.flatten, lambda each: each[:-1], lambda each: each.t()]
)
def test_no_key_is_blamed_for_a_damaged_tensor(
    change: Callable[[torch.Tensor], torch.Tensor], world: World, tmp_path: Path
) -> None:
    reference("llama").save_pretrained(tmp_path / "model")
    tensors = tensors_of(tmp_path / "model")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model/model.safetensors")
    with pytest.raises(HpctrainError, match=r"1\.self_attn\.q_proj\.weight: has") as caught:
        import_model(world, tmp_path / "model", tmp_path / "model.h5")
    assert ", where" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "fits"), [("opt", False), (3, False), ("kimi_k2", True), (None, True)]
)
def test_a_model_type_that_contradicts_the_architecture_is_refused(
    model_type: object, fits: bool, world: World, tmp_path: Path
) -> None:
    reference("llama").save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))
    if fits:
        import_model(world, tmp_path / "model", tmp_path / "model.h5")
        return
    with pytest.raises(HpctrainError, match=r"model_type = .*: contradicts architectures"):
        import_model(world, tmp_path / "model", tmp_path / "model.h5")
