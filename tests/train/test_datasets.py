"""Runs on datasets that users bring, by the command: resumed on other ranks within an epoch, replayed,
inspected, planned, and ended in a sentence where something of a user's own is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from tests.train.test_module import RUN_KEYS, hpctrain, losses, tensors

Launch = Callable[..., "CompletedProcess[str]"]

CODE = """
import os
import numpy as np
import torch
from torch import nn

class Noisy:
    def __init__(self, count=44, bad=-1, kind=""):
        self.count, self.bad, self.kind = count, bad, kind

    def __len__(self):
        return self.count + (self.kind == "length") * int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))

    def __getitem__(self, index):
        if index >= self.bad >= 0 and "OMPI_COMM_WORLD_RANK" not in os.environ and self.kind == "killed":
            os.kill(os.getpid(), 9)
        if index >= self.bad >= 0 and self.kind == "fails":
            raise ValueError(f"number {index}")
        x = torch.randn(4) + np.random.rand()
        return {"x": x, "labels": index % 3}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x)

class Floats(Noisy):
    def __getitem__(self, index):
        return {"x": torch.zeros(4), "targets": 0.5}

class Names(Noisy):
    def __getitem__(self, index):
        return {"a": torch.zeros(4), "b": torch.zeros(4), "labels": 1}
"""
DECK = f"""
[run]
title = "mine"
steps = 9
evaluate_every = 3
[model]
module = "mine.py:Model"
[data]
dataset = "mine.py:Noisy"
validation = 0.15
[batch]
global_size = 8
micro_size = 2
{RUN_KEYS}
decay_steps = 9
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/mine.py").write_text(CODE)
    (tmp_path / "code/deck.toml").write_text(DECK)
    return tmp_path


def sets(*changes: str) -> list[str]:
    return [each for change in changes for each in ("--set", change)]


def test_a_run_goes_on_within_an_epoch_on_other_ranks(folder: Path, launch: Launch) -> None:
    """Of 38 samples a step takes 8: the fifth step is in two epochs; items draw random numbers."""
    hpctrain(launch, 2, "run", "code/deck.toml", *sets("run.dir=runs/whole"))
    hpctrain(launch, 2, "run", "code/deck.toml", *sets("run.steps=3", "data.workers=1"))
    (folder / "code/deck.toml").unlink()
    hpctrain(launch, 1, "resume", "runs/mine", "--trust-code", *sets("run.steps=6", "data.workers=2"))
    out = hpctrain(
        launch,
        4,
        "resume",
        "runs/mine",
        "--trust-code",
        *sets("run.steps=9", "data.workers=0", "layout.zero=3"),
    )
    assert "is not the dataset" not in out and "samples/s" in out
    run, whole = folder / "runs/mine", folder / "runs/whole"
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-5)
    expected = tensors(whole / "checkpoints/step-00000009.h5")
    for name, found in tensors(run / "checkpoints/step-00000009.h5").items():
        assert abs(found - expected[name]).max() <= 2e-5 * abs(expected[name]).max(), name
    rows = [json.loads(row) for row in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [8 * step for step in range(1, 10)] and "mfu" not in rows[0]
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6, 9]
    told = hpctrain(launch, 0, "inspect", "runs/mine/checkpoints/step-00000009.h5")
    assert "mine.py:Noisy" in told and "72 samples" in told and "tokens" not in told
    told = hpctrain(
        launch,
        2,
        "replay",
        "--trust-code",
        "runs/whole/checkpoints/step-00000003.h5",
        *sets("data.workers=1"),
    )
    assert "The 6 replayed losses are equal to the recorded, bit for bit" in told
    other = sets("data.arguments={count=45}")
    told = hpctrain(
        launch, 1, "replay", "--trust-code", "runs/whole/checkpoints/step-00000003.h5", *other, code=2
    )
    assert "is not the dataset that" in told
    told = hpctrain(launch, 1, "resume", "runs/whole", "--trust-code", *other, *sets("run.steps=10"))
    told = " ".join(told.split())
    assert "(expected 44 samples of " in told and "with {count = 45})" in told


def test_a_plan_and_a_resolved_deck_have_no_tokens(folder: Path, launch: Launch) -> None:
    planned = json.loads(hpctrain(launch, 0, "plan", "code/deck.toml", "--ranks", "2", "--json"))
    hpctrain(launch, 2, "run", "code/deck.toml", *sets("run.steps=2"))
    held = json.loads((folder / "runs/mine/plan.json").read_text())["measured"]
    (stage,) = planned["stages"]
    for kind in ("parameter", "gradient", "optimizer"):
        assert {row[f"{kind}_bytes"] for row in held} == {stage[f"{kind}_bytes"]}, kind
    text = (folder / "runs/mine/deck.toml").read_text()
    keys = {line.split(" = ")[0] for line in text.splitlines()}
    assert not {"tokens", "sequence", "vocabulary", "other_tokenizer"} & keys and "dataset" in keys


WRONG = {
    "fails": (
        ("data.arguments={bad=7, kind='fails'}",), 2,
        ["mine.py:Noisy: item ", "in __getitem__: raise ValueError(f"],
    ),
    "fails elsewhere": (
        ("data.arguments={bad=7, kind='fails'}", "data.workers=1"), 2,
        ["mine.py:Noisy: item ", "in __getitem__: raise ValueError(f"],
    ),
    "killed": (
        ("data.arguments={bad=7, kind='killed'}", "data.workers=1"), 70,
        ["mine.py:Noisy: a process that loads items (1 of data.workers = 1) was killed (signal 9)"],
    ),
    "length": (
        ("data.arguments={kind='length'}",), 2,
        ["has 44 samples on rank 0, but 45 on rank 1; all ranks must have the same number"],
    ),
    "floats": (("data.dataset=mine.py:Floats",), 2, ["has targets of float32 [], expected whole "
        "numbers for each sample or token"]),
    "names": (
        ("data.dataset=mine.py:Names",), 2,
        ["is required: it names the batch entries for the arguments of the module, x (the entries of a "
            "batch are a, b, lab"],
    ),
    "inputs": (("data.inputs=['y']",), 2, ["contains y, but the entries of a batch are x, labels"]),
    "loss": (("model.loss=mine.py:none",), 2, ["mine.py has no none"]),
    "both": (("data.tokens=t.h5",), 2, ["conflicts with data.dataset (leave one of them out)"]),
    "sequence": (("batch.sequence=7",), 2, ["has no effect with data.dataset, whose samples are counted"]),
    "own families": (
        ("model.module=", "model.preset=gpt2-124m"), 2,
        ["requires model.module, which is not given: built-in models read token files"],
    ),
    "one sample": (("data.arguments={count=1}",), 2, ["mine.py:Noisy has 1 sample, which data.validation"]),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_told_once(folder: Path, launch: Launch, wrong: str) -> None:
    changes, code, told = WRONG[wrong]
    out = hpctrain(launch, 2, "run", "code/deck.toml", *sets(*changes), code=code)
    assert "Traceback" not in out
    for each in told:
        assert out.count(each) == 1, out
    assert out.count("hpctrain: error: ") == len(told), out
