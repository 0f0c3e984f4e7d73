"""The Python interface: a script that trains its own module under mpirun, and mistakes that it may make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import hpctrain.api

Launch = Callable[..., "CompletedProcess[str]"]

SCRIPT = """
import torch
from torch import nn
from hpctrain.api import World, check, resume, run

class Mlp(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.layers(x)[:, 0]

class Squares:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": (x * x).sum()}

def loss(outputs, batch):
    return (outputs - batch["y"]).square().sum(), len(outputs)

MINE = dict(build=Mlp, data=Squares, loss=loss, arguments={"hidden": 8})
"""
BEGUN = '\nif __name__ == "__main__":\n    '
DECK = """
[run]
title = "squares"
steps = 4
[data]
inputs = ["x"]
[batch]
global_size = 8
micro_size = 2
[learning_rate]
peak = 0.01
"""


@pytest.fixture
def script(tmp_path: Path, launch: Launch) -> Callable[..., CompletedProcess[str]]:
    (tmp_path / "deck.toml").write_text(DECK)

    def run(ranks: int, begins: str, guarded: bool = True) -> CompletedProcess[str]:
        (tmp_path / "train.py").write_text(SCRIPT + (BEGUN if guarded else "\n") + begins)
        return launch(ranks, "train.py")

    return run


def test_a_script_trains_and_goes_on(
    tmp_path: Path, launch: Launch, script: Callable[..., CompletedProcess[str]]
) -> None:
    done = script(2, 'run("deck.toml", **MINE, changes={"layout.zero": 2}); print("after-it")')
    assert done.returncode == 0 and done.stdout.count("after-it") == 2, done.stderr
    for going_on in (
        lambda: launch(
            1, "-m", "hpctrain", "resume", "runs/squares", "--set", "run.steps=6", "--set", "layout.zero=0"
        ),
        lambda: script(2, 'resume("runs/squares", changes={"run.steps": 8})'),
    ):
        done = going_on()
        assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in (tmp_path / "runs/squares/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 9)]
    assert "train.py:Mlp" in (tmp_path / "runs/squares/deck.toml").read_text()


def test_a_world_serves_several_verbs(script: Callable[..., CompletedProcess[str]]) -> None:
    done = script(
        2,
        'world = World.start(); assert check("deck.toml", **MINE, world=world); '
        'run("deck.toml", **MINE, world=world); run("deck.toml", **MINE, world=world, fresh=True); '
        'world.finish(); print(f"rank-{world.rank}")',
    )
    assert done.returncode == 0, done.stderr
    assert "this layout computes the same model" in " ".join(done.stdout.split())
    assert "rank-0" in done.stdout and "rank-1" in done.stdout


WRONG = {
    "lambda": ('run("deck.toml", build=lambda: Mlp())', "build: <function <lambda>", "at the top of a file"),
    "name": ('run("deck.toml", los=loss)', "los: nothing of that name is taken", "blocks, loss, initial"),
    "deck": ('run("dekc.toml", **MINE)', "dekc.toml", "hpctrain: error"),
    "twice": ('run("deck.toml", **MINE); run("deck.toml", **MINE)', "ended by an earlier run", "one world"),
    "value": ('run("deck.toml", **MINE, changes={"batch.micro_size": 0})', "=0: must", "at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_mistakes_are_one_sentence(wrong: str, script: Callable[..., CompletedProcess[str]]) -> None:
    begins, *told = WRONG[wrong]
    done = script(1, begins)
    assert done.returncode in {2, 3}, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    for each in told:
        assert each in done.stderr, done.stderr


def test_a_script_that_runs_where_it_is_loaded_is_told(
    launch: Launch, script: Callable[..., CompletedProcess[str]]
) -> None:
    assert script(1, 'run("deck.toml", **MINE)', guarded=False).returncode == 0
    done = launch(1, "-m", "hpctrain", "resume", "runs/squares", "--set", "run.steps=6")
    assert done.returncode == 2 and '`if __name__ == "__main__":`' in done.stderr, done.stderr


def test_there_are_few_names_and_each_says_what_it_is() -> None:
    assert len(hpctrain.api.__all__) <= 12
    assert all(getattr(hpctrain.api, name).__doc__ for name in hpctrain.api.__all__)
