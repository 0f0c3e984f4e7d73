"""Tests of the comparison of a checkpoint's parameters with its stored deck."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError
from hpctrain.report.described_model import require_described_model
from tests.engines import LLAMA
from tests.generate.test_text_model import MIXTURE, make_checkpoint

MODELS = {
    "gpt2": (),
    "llama": (*LLAMA, "precision.compute=bf16"),
    "mixture": (*MIXTURE, "model.experts.balance=bias"),
    "adapters": (*LLAMA, "model.adapters={rank = 2}"),
    "scores": ("objective.kind=reward", "model.tied=false"),
}


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_of_runs_are_accepted(world: World, tmp_path: Path, name: str) -> None:
    make_checkpoint(world.single_rank_world(), tmp_path / "a.h5", *MODELS[name])
    require_described_model(examine(tmp_path / "a.h5"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers = 2", "layers = 3", r"blocks\.2\.\S+ is missing \(and \d+ more differ\)"),
        ("layers = 2", "layers = 1", r"blocks\.1\.\S+ is not in the model of the deck"),
        ("hidden = 32", "hidden = 64", r"has shape \[.*\], but \[.*\] in the model of the deck"),
    ],
)
def test_deck_of_another_model_is_refused(
    world: World, tmp_path: Path, old: str, new: str, message: str
) -> None:
    make_checkpoint(world.single_rank_world(), tmp_path / "a.h5")
    structure = examine(tmp_path / "a.h5")
    deck = structure.state["deck"]
    assert deck.count(f"\n{old}\n") == 1
    wrong = replace(structure, state=structure.state | {"deck": deck.replace(f"\n{old}\n", f"\n{new}\n")})
    with pytest.raises(InputOutputError, match=rf"a\.h5: its deck describes another model: .*{message}"):
        require_described_model(wrong)
