"""Runs of a module on stages of a pipeline, by the command: resumed on other layouts, split by measured time,
and refused where it cannot be cut.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.train.test_module import Launch, folder, hpctrain, losses, tensors, tokens

__all__ = ["folder", "tokens"]

MODELS = Path(__file__).parents[1] / "model/modules"
STAGED = ("model.module=staged.py:dicts", "model.arguments=", "model.blocks=rows.*", "model.buffers=first")
FEWER = ("layout.zero=0", "run.evaluate_every=9", "optimizer.epsilon=1e-4")


def changes(*keys: str) -> list[str]:
    return [each for key in keys for each in ("--set", key)]


@pytest.fixture
def staged(folder: Path) -> Path:
    text = (MODELS / "staged_models.py").read_text()
    text = text.replace("from tests.model.modules import models", "import my_models as models")
    (folder / "code/staged.py").write_text(text)
    return folder


@pytest.mark.sampled(1)
def test_a_run_goes_on_with_other_stages(staged: Path, launch: Launch) -> None:
    run, begun = staged / "runs/mine", changes(*STAGED, *FEWER)
    hpctrain(launch, 1, "run", "code/deck.toml", *begun, "--set", "run.dir=runs/whole")
    two = changes("layout.pipeline=2", "layout.schedule=zb-v", "stability.check_parameters=true")
    short = changes("run.steps=3", "learning_rate.decay_steps=9", "layout.pipeline=2", "layout.split=[3, 1]")
    hpctrain(launch, 2, "run", "code/deck.toml", *begun, *short)
    hpctrain(
        launch,
        2,
        "resume",
        "runs/mine",
        "--trust-code",
        *changes("layout.pipeline=1", "layout.split=", "run.steps=6"),
    )
    hpctrain(launch, 2, "resume", "runs/mine", "--trust-code", *two, *changes("run.steps=9"))
    np.testing.assert_allclose(losses(run), losses(staged / "runs/whole"), rtol=1e-5)
    last = "checkpoints/step-00000009.h5"
    expected, found = tensors(staged / "runs/whole" / last), tensors(run / last)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        # Statistics are those of the first data rank: for three steps there were two of them.
        if not name.startswith("buffer"):
            assert abs(value - expected[name]).max() <= 2e-5 * abs(expected[name]).max(), name
    assert "buffer/rows.3.batch_norm.running_mean" in found
    evaluated = []
    for each in (run, staged / "runs/whole"):
        rows = [json.loads(row) for row in (each / "metrics.jsonl").read_text().splitlines()]
        evaluated.append([row["validation_loss"] for row in rows if "validation_loss" in row][-1])
    assert evaluated[0] == pytest.approx(evaluated[1], rel=0.02)  # their statistics differ


def test_layers_go_where_measured_times_tell(staged: Path, launch: Launch) -> None:
    balanced = changes(*STAGED, *FEWER, "layout.pipeline=2", "layout.split=balanced", "run.steps=1")
    told = hpctrain(launch, 2, "run", "code/deck.toml", *balanced)
    assert "layers of each part: " in told and "DictBlock" in told and "outside" in told, told


TURNS = ("layout.schedule=interleaved",)


def test_the_check_compares_what_each_stage_computes(staged: Path, launch: Launch) -> None:
    layout = changes(*STAGED, *FEWER, "layout.pipeline=2", "layout.schedule=zb-v")
    told = hpctrain(launch, 2, "check", "code/deck.toml", *layout)
    assert "outputs" in told and "computes the same" in told, told


WRONG = {
    "in all blocks": (
        ("layout.pipeline=2", "layout.chunks=2", *TURNS, "model.arguments={layers=4}"),
        "the parameter scale, which is used by block layers.0, block layers.1, ... and block "
        "layers.3 on several stages",
    ),
    "too few": (("layout.pipeline=2", "layout.chunks=3", *TURNS), "requires 5 blocks or more, but "
        "model.blocks"),
    "no blocks": (("layout.pipeline=2", "model.blocks="), "requires model.blocks, which names the blocks"),
    "another sum": (("layout.pipeline=2", "layout.split=[2, 2]"), "must add up to the number of blocks, "
        "not 4: model.blocks names 3"),
    "twice": (
        ("layout.pipeline=2", *("model.module=my_models.py:odd", "model.arguments=", "model.buffers=first"),
         "model.blocks=blocks.*"),
        "block blocks.1 is called 2 times in a forward pass",
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_cut_is_told_once_in_a_sentence(folder: Path, launch: Launch, wrong: str) -> None:
    keys, told = WRONG[wrong]
    out = hpctrain(launch, 2, "run", "code/deck.toml", *changes("layout.zero=0", *keys), code=2)
    assert out.count(told) == 1, out
    assert "Traceback" not in out and not (folder / "runs").exists()
