"""Configs of models that were not imported: `transformers` makes a model of each, which computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.exchange.hugging_face.architectures import ARCHITECTURES, LANGUAGE_MODELS
from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.hugging_face.config_writer import config_of

transformers = pytest.importorskip("transformers")

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
    defaults = {} if name == "Phi3ForCausalLM" else {"pad_token_id": None}
    model = kind(kind.config_class(**config, **defaults))
    with torch.no_grad():
        assert model(torch.ones(1, 12, dtype=torch.long)).logits.isfinite().all()
