"""The key of a config.json that a message names where it contradicts the tensors of a mixture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.checkpoint.exchange.convert import import_model
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from tests.checkpoint.exchange.test_families import reference

pytest.importorskip("transformers")
pytest.importorskip("safetensors")


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
    ("key", "value", "cause"),
    [
        ("attention_bias", False, ", where attention_bias = False"),
        ("mlp_bias", True, ", where mlp_bias = True"),
        ("head_dim", 16, ", where num_attention_heads = 6 and head_dim = 16"),
    ],
)
def test_the_key_that_switches_tensors_on_is_named(
    key: str, value: object, cause: str, world: World, tmp_path: Path
) -> None:
    reference("llama").save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(HpctrainError) as caught:
        import_model(world, tmp_path / "model", tmp_path / "model.h5")
    assert cause in caught.value.problems[0]


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
