"""The Python interface: a script that trains its own module under mpirun, and mistakes that it may make."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import hpctrain.api
from hpctrain.errors import HpctrainError
from hpctrain.files import path_of

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
            1,
            "-m",
            "hpctrain",
            "resume",
            "runs/squares",
            "--trust-code",
            "--set",
            "run.steps=6",
            "--set",
            "layout.zero=0",
        ),
        lambda: script(2, 'resume("runs/squares", changes={"run.steps": 8}, trust_code=True)'),
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


AFTER_A_RUN = """
import sys
import hpctrain

if __name__ == "__main__":
    hpctrain.run("lm.toml")
    model = hpctrain.load("runs/lm", device="cpu")
    assert model.step == 2 and model.logits([1, 2]).shape == (2, 257)
    hpctrain.resume("runs/lm", changes={"run.steps": 3})
    assert hpctrain.load("runs/lm", device="cpu").step == 3
    print("after-it")
    sys.exit(5 if len(sys.argv) > 1 else 0)
"""
LANGUAGE_MODEL = """
[run]
title = "lm"
steps = 2
[model]
family = "llama"
layers = 1
hidden = 16
heads = 2
mlp = 24
[data]
tokens = "tokens.h5"
[batch]
global_size = 4
sequence = 16
[machine]
peak_flops = 1e10
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_loads_and_a_run_goes_on_after_a_run(tmp_path: Path, launch: Launch, ranks: int) -> None:
    (tmp_path / "text.txt").write_text("one two three " * 400)
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    (tmp_path / "lm.toml").write_text(LANGUAGE_MODEL)
    (tmp_path / "after.py").write_text(AFTER_A_RUN)
    done = launch(ranks, "after.py", *(["fails"] if ranks == 1 else []))
    assert done.returncode == (5 if ranks == 1 else 0), done.stderr
    assert done.stdout.count("after-it") == ranks


WRONG = {
    "lambda": ('run("deck.toml", build=lambda: Mlp())', "build: <function <lambda>", "at the top level of"),
    "name": ('run("deck.toml", los=loss)', "los: unknown argument", "blocks, loss, initial"),
    "deck": ('run("dekc.toml", **MINE)', "dekc.toml", "hpctrain: error"),
    "value": ('run("deck.toml", **MINE, changes={"batch.micro_size": 0})', "=0: must", "at least 1"),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong", WRONG)
def test_mistakes_are_one_sentence(wrong: str, script: Callable[..., CompletedProcess[str]]) -> None:
    begins, *told = WRONG[wrong]
    done = script(1, begins)
    assert done.returncode in {2, 3}, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    for each in told:
        assert each in done.stderr, done.stderr


def test_a_run_after_the_end_of_mpi_is_one_sentence(script: Callable[..., CompletedProcess[str]]) -> None:
    done = script(2, 'World.start().finish(); run("deck.toml", **MINE)')
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("MPI is already finalized") == 1, done.stderr


def test_a_run_in_a_finished_world_raises_an_error(script: Callable[..., CompletedProcess[str]]) -> None:
    done = script(1, 'world = World.start(); world.finish(); run("deck.toml", **MINE, world=world)')
    assert "HpctrainError: MPI is already finalized" in done.stderr, done.stderr


def test_a_script_that_runs_where_it_is_loaded_is_told(
    launch: Launch, script: Callable[..., CompletedProcess[str]]
) -> None:
    assert script(1, 'run("deck.toml", **MINE)', guarded=False).returncode == 0
    done = launch(1, "-m", "hpctrain", "resume", "runs/squares", "--trust-code", "--set", "run.steps=6")
    assert done.returncode == 2 and '`if __name__ == "__main__":`' in done.stderr, done.stderr


def test_there_are_few_names_and_each_says_what_it_is() -> None:
    assert len(hpctrain.api.__all__) <= 12
    assert all(getattr(hpctrain.api, name).__doc__ for name in hpctrain.api.__all__)


TOLD = {
    "an instance": (
        {"data": SimpleNamespace()},
        "data: must be a function or class .* not a SimpleNamespace",
    ),
    "items": ({"data": [1]}, "data: must be a function or class .* not a list itself"),
    "a module": (
        {"build": torch.nn.Linear(2, 2)},
        "build: must be a function or class .* not a Linear itself",
    ),
    "a part": ({"build": partial(int)}, "build: must be a function or class .* not a partial itself"),
    "a lambda": ({"loss": lambda: 3}, "loss: <function .* cannot be imported by its name"),
    "arguments": ({"arguments": {"kind": {3}}}, r"arguments\.kind: a set cannot be a value of a deck"),
    "none within": ({"arguments": {"kind": None}}, r"arguments\.kind: None cannot be a value of a deck"),
    "numbers": ({"arguments": {3: 4}}, "arguments: a dict cannot be a value of a deck"),
    "a list": ({"changes": [1]}, "changes: must be a dict such as .* not a list"),
    "no keys": ({"changes": {3: 1}}, "changes: must be a dict"),
    "a value": ({"changes": {"run.steps": object()}}, r"changes: run\.steps: an object cannot be a value"),
}


@pytest.mark.parametrize("kind", TOLD)
def test_what_no_deck_can_say_is_told(kind: str) -> None:
    given, told = TOLD[kind]
    with pytest.raises(HpctrainError, match=told):
        hpctrain.api._changes(cast(hpctrain.api.DeckDefaults, given))


def test_what_is_given_is_written_as_a_deck_has_it() -> None:
    changes = {
        "run.steps": None,
        "run.dir": Path("a b"),
        "batch.micro_size": np.int64(2),
        "optimizer.clip": np.float32(0.5),
    }
    given = {"loss": None, "arguments": {"sizes": (1, 2)}, "build": torch.nn.Linear, "changes": changes}
    assert hpctrain.api._changes(cast(hpctrain.api.DeckDefaults, given)) == [
        *("model.loss=", "model.arguments={sizes = [1, 2]}", 'model.module="torch.nn.modules.linear:Linear"'),
        *("run.steps=", 'run.dir="a b"', "batch.micro_size=2", "optimizer.clip=0.5"),
    ]


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "2"])
def test_ranks_are_at_least_one(ranks: Any) -> None:
    with pytest.raises(HpctrainError, match=r"^ranks: must be a whole number of at least 1, not "):
        hpctrain.make_deck({"run": {"steps": 1}}, ranks=ranks)


def test_a_change_is_told_as_a_change() -> None:
    with pytest.raises(HpctrainError) as caught:
        hpctrain.make_deck({"run": {"steps": 1}}, changes={"run.stepz": 3}, blocks="a")
    unknown, *_ = (problem for problem in caught.value.problems if "stepz" in problem)
    assert unknown == "changes: run.stepz=3: unknown key (did you mean run.steps?)"
    assert not any("--set" in problem for problem in caught.value.problems)
    assert any(problem.startswith('blocks: model.blocks="a": ') for problem in caught.value.problems)
    [given] = pickle.loads(pickle.dumps(hpctrain.api._changes({"changes": {"run.steps": 3}})))
    assert (given, given.name) == ("run.steps=3", "changes")


@pytest.mark.parametrize("call", [hpctrain.check, hpctrain.run, hpctrain.resume])
def test_what_is_no_path_at_all_ends_no_script(call: Callable[[Any], object]) -> None:
    with pytest.raises(HpctrainError, match="must be the path of a file, not an int"):
        call(3)


@pytest.mark.parametrize("deck", [None, {}, 3, ""])
def test_a_deck_is_a_path(deck: Any) -> None:
    with pytest.raises(HpctrainError, match="deck: must be the path of a file, not "):
        path_of(deck, "deck")
    assert path_of("a", "deck") == Path("a")


GUARDED = """
import os
try:
    def tried(): ...
except ImportError:
    pass
def both(): ...
if os.name == "posix":
    class Chosen: ...
if __name__ == "__main__":
    def both(): ...
    for _ in range(1):
        def local(): ...
"""


def test_what_is_made_where_a_script_begins_is_not_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    (tmp_path / "train.py").write_text(GUARDED)
    exec(GUARDED, main.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, "__main__", main)
    for name in ("tried", "both", "Chosen"):
        assert hpctrain.api._deck_value("loss", getattr(main, name)) == f"{tmp_path}/train.py:{name}"
    with pytest.raises(HpctrainError, match=r"loss: .*local.* \(outside of .if __name__ == .__main__.:.\)"):
        hpctrain.api._deck_value("loss", main.local)
    main.__file__ = None
    with pytest.raises(HpctrainError, match="cannot be imported"):
        hpctrain.api._deck_value("loss", main.both)


def test_names_of_the_first_version_still_work_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="hpctrain.Given is now hpctrain.DeckDefaults"):
        assert hpctrain.Given is hpctrain.DeckDefaults
