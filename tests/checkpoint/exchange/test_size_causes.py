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
