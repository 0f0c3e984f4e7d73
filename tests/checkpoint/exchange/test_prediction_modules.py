"""Modules of multi-token prediction in folders of DeepSeek-V3: there and back, and as a start of runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.entries import model_entries
from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.exchange.source import load_source, open_model, source_shape
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.model.part import parameter_list
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.sharding.replication import Replications
from tests.checkpoint.exchange.test_families import LAYERS, reference
from tests.checkpoint.exchange.test_hugging_face import assert_same_bits, tensors_of
from tests.engines import make_buckets

safetensors = pytest.importorskip("safetensors.torch")


def save_with_module(folder: Path) -> dict[str, Tensor]:
    """Save a model of `transformers`, add a module to it, and return the tensors of the module."""
    reference("deepseek-v3").save_pretrained(folder)
    tensors = tensors_of(folder)
    last, new = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    added = {new + name.removeprefix(last): each for name, each in tensors.items() if name.startswith(last)}
    hidden = tensors["model.norm.weight"].shape[0]
    torch.manual_seed(3)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{new}{name}.weight"] = torch.randn(hidden)
    added[f"{new}eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
    added = {name: each + 0.1 * torch.randn_like(each) for name, each in added.items()}
    added[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    added[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    safetensors.save_file({**tensors, **added}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return added


def test_export_gives_back_the_same_bits(world: World, tmp_path: Path) -> None:
    save_with_module(tmp_path / "theirs")
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    assert source_shape(tmp_path / "model.h5").mtp_layers == 1
    export_model(world, tmp_path / "model.h5", tmp_path / "ours", None, 1 << 30)
    assert_same_bits(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("kind", ["theirs", "model.h5"])
@pytest.mark.parametrize("modules", [0, 1, 2])
def test_a_run_takes_the_modules_that_it_has(world: World, tmp_path: Path, kind: str, modules: int) -> None:
    added = save_with_module(tmp_path / "theirs")
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    shape = replace(open_model(tmp_path / "theirs").shape, mtp_layers=modules)
    mesh = Mesh(world.single_rank_world(), {})
    model = Transformer(shape, LayerContext(tensor=mesh.group("tensor"), context=mesh.group("context")))
    buckets = make_buckets(model.units(), Replications.unsharded(mesh), torch.float32, 10_000)
    load_source(tmp_path / kind, world, model_entries(buckets))
    found = {parameter.shard.name: parameter for parameter in parameter_list(model)}
    projection = f"model.layers.{LAYERS}.eh_proj.weight"
    for depth in range(modules):
        values = found[f"blocks.{LAYERS + depth}.projection.weight"]
        assert torch.equal(values, torch.zeros_like(values) if depth else added[projection])
    assert torch.equal(found["embedding.tokens.weight"], added[f"model.layers.{LAYERS}.embed_tokens.weight"])


def test_modules_that_a_folder_lacks_are_left_out(world: World, tmp_path: Path) -> None:
    reference("deepseek-v3", num_nextn_predict_layers=1).save_pretrained(tmp_path / "theirs")
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    assert source_shape(tmp_path / "model.h5").mtp_layers == 0
