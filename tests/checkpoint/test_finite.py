"""Tests of the check for NaN and infinite weights, on layouts with several ranks too."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpctrain.checkpoint.exchange.convert import import_model
from hpctrain.checkpoint.finite import NonFiniteWeight, nonfinite_element, nonfinite_weight
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.world import World
from hpctrain.errors import EXIT_INPUT_OUTPUT, InputOutputError
from hpctrain.parallel.shards import Shard
from hpctrain.train.run import run_deck
from tests.data.preparing import prepare
from tests.model.test_against_transformers import llama_reference

DECK = """
[run]
title = "started"
steps = 1
dir = "{folder}/run"
[model]
from = "{folder}/model"
vocabulary = 257
[data]
tokens = "{folder}/tokens.h5"
[batch]
global_size = 2
sequence = 16
"""
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_first_nonfinite_element(value: float, kind: torch.dtype) -> None:
    values = torch.zeros(3, 4, dtype=kind)
    assert nonfinite_element(values) is None
    values[2, 0], values[1, 3] = math.nan, value
    result = nonfinite_element(values)
    assert result is not None and result[0] == (1, 3)
    assert result[1] == value or math.isnan(value)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_ranks_agree_on_the_first_nonfinite_weight(world: World) -> None:
    """Each rank has some of the columns. Padding and other state are not checked."""

    def entry(dataset: str, bad: dict[tuple[int, int], float]) -> TensorRange:
        global_values = torch.zeros(4, 7)
        for index, value in bad.items():
            global_values[index] = value
        shard = Shard("w", (4, 7), (0, 4 * world.rank), (4, 4))
        local_values = torch.full((4, 4), math.nan)
        local_values[:, : shard.extent[1]] = global_values[shard.slices]
        return TensorRange(dataset, shard, local_values.flatten()[2:], offset=2)

    entries = [
        entry("/optimizer/exp_avg/a", {(0, 4): math.inf}),
        entry("/model/c", {(1, 0): math.inf}),
        entry("/model/b", {(2, 5): -math.inf, (3, 2): math.nan, (2, 4): math.inf}),
    ]
    result = nonfinite_weight(world.everyone, entries)
    assert result == NonFiniteWeight("/model/b", (2, 4), math.inf)
    assert str(result) == "/model/b is inf at [2, 4]"
    assert nonfinite_weight(world.everyone, entries[:1]) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model in a Hugging Face folder with one weight that is NaN."""
    folder = tmp_path_factory.mktemp("finite")
    llama_reference()[0].save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights[NAME][3, 5] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_import_refuses_a_nonfinite_weight(world: World, model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputOutputError) as caught:
        import_model(world.single_rank_world(), model, tmp_path / "model.h5")
    assert caught.value.exit_code == EXIT_INPUT_OUTPUT
    assert caught.value.problems == (
        f"{model}/model.safetensors: {NAME} is nan at [3, 5]: weights must be finite numbers (download or "
        "save the model again, or use another one)",
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.mpi(min_size=2, max_size=2)
def test_run_refuses_to_start_from_a_nonfinite_weight(world: World, mpi_tmp_path: Path) -> None:
    """All ranks raise the error, whichever of them reads the weight."""
    folder = mpi_tmp_path
    if world.rank == 0:
        llama_reference()[0].save_pretrained(folder / "model")
        weights = load_file(folder / "model" / "model.safetensors")
        weights[NAME][3, 5] = math.nan
        save_file(weights, folder / "model" / "model.safetensors", {"format": "pt"})
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
        (folder / "deck.toml").write_text(DECK.format(folder=folder))
    world.everyone.barrier()
    prepare(world, folder / "tokens.h5", [str(folder / "text.txt")])
    for keys in (["layout.tensor=2"], ["layout.pipeline=2"]):
        with pytest.raises(InputOutputError) as caught:
            run_deck(world, folder / "deck.toml", keys)
        (problem,) = caught.value.problems
        assert problem.startswith(f"{folder}/model/model.safetensors: {NAME} is nan at [3, 5]: ")
