"""`import hpctrain`: its names, a run that a script makes, and the scripts of inputs/ that look at it.

Tests of deck/toml_text.py beside tests/deck/test_toml_text.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import hpctrain
import hpctrain.api
from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError
from tests.data.preparing import prepare
from tests.launch import ROOT

Launch = Callable[..., "CompletedProcess[str]"]

SIZES: dict[str, Any] = {
    "run": {"title": "small", "steps": 6, "evaluate_every": 3},
    "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "key_value_heads": 2},
    "data": {"tokens": "tokens.h5", "validation": 0.1},
    "batch": {"global_size": 4, "micro_size": 2, "sequence": 32},
    "learning_rate": {"peak": 0.01},
}
SCRIPT = f"""
import hpctrain

deck = hpctrain.make_deck({SIZES!r}, changes={{"run.seed": 7}}, file="small.toml")
if __name__ == "__main__":
    assert deck.run.seed == 7 and deck.optimizer.name == "adamw"
    hpctrain.run(deck)
    print(f"after-it-{{len(hpctrain.metrics(deck.run.dir)['step'])}}")
"""


def test_one_door_has_few_names() -> None:
    assert sorted(hpctrain.__all__) == sorted(hpctrain.api.__all__) and len(hpctrain.__all__) <= 12
    for name in hpctrain.__all__:
        assert getattr(hpctrain, name) is getattr(hpctrain.api, name), name
        assert name in dir(hpctrain) and getattr(hpctrain, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'metrix'"):
        _ = hpctrain.metrix  # type: ignore[attr-defined]
    assert import_module("hpctrain.deck").__path__  # a room, which no name hides


def test_the_import_brings_nothing_heavy() -> None:
    program = "import sys, hpctrain; print({'torch', 'mpi4py', 'numpy', 'click'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text() and (ROOT / "hpctrain/py.typed").exists()


@pytest.fixture
def tokens(world: World, tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"{n * n % 997} lines of text\n" for n in range(600)))
    prepare(world.single_rank_world(), tmp_path / "tokens.h5", [str(tmp_path / "text.txt")])
    return tmp_path / "tokens.h5"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_deck_is_made_run_and_looked_at(ranks: int, tokens: Path, tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = launch(ranks, "train.py")
    assert done.returncode == 0 and done.stdout.count("after-it-6") == ranks, done.stderr
    assert read_deck(tmp_path / "small.toml").run.seed == 7
    looked = launch(1, str(ROOT / "inputs/look.py"), "runs/small")
    assert looked.returncode == 0, looked.stderr
    assert "6 steps, 768 tokens" in looked.stdout and f"a run on {ranks} ranks, peak 0.01" in looked.stdout
    assert looked.stdout.count("two rows of spread") == 3 and " has norm " in looked.stdout
    told = launch(1, str(ROOT / "inputs/sample.py"), "runs/small", "12 lines")
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("comes next with probability") == 3 and "\n12 lines" in told.stdout
    for script in ("look", "sample"):
        done = launch(1, str(ROOT / f"inputs/{script}.py"), "runs", "a")
        assert done.returncode == 1 and "Traceback" not in done.stderr and "runs" in done.stderr


def test_a_world_serves_several_decks(world: World, tokens: Path, tmp_path: Path) -> None:
    base = SIZES | {"data": {"tokens": str(tokens)}}
    for seed in (1, 2):
        changes = {"run.seed": seed, "run.dir": str(tmp_path / f"{seed}"), "run.evaluate_every": 0}
        deck = hpctrain.make_deck(base, ranks=1, changes=changes)
        hpctrain.run(deck, world=world.single_rank_world(), changes={"run.steps": 2})
    losses = [hpctrain.metrics(tmp_path / f"{seed}")["loss"] for seed in (1, 2)]
    assert [len(each) for each in losses] == [2, 2] and losses[0][0] != losses[1][0]


def test_a_deck_that_will_not_do_is_told(tmp_path: Path) -> None:
    with pytest.raises(HpctrainError) as caught:
        hpctrain.make_deck(SIZES | {"batch": {"global_size": 0}}, changes={"run.stepz": 3})
    text = "\n".join(caught.value.problems)
    assert "batch.global_size = 0: must be" in text and "run.stepz" in text and "run.steps" in text
    with pytest.raises(HpctrainError, match=r"layout\.tensor"):
        hpctrain.make_deck(SIZES, ranks=2, changes={"layout.tensor": 3})
    wide, file = {"layout.tensor": 2}, tmp_path / "wide.toml"
    assert hpctrain.make_deck(SIZES, ranks=2, changes=wide, file=file).layout.tensor == 2
    for base in (SIZES, file):  # of one rank, which alone makes it wrong
        with pytest.raises(HpctrainError, match="must divide the number of ranks, 1 "):
            hpctrain.make_deck(base, ranks=1, changes=wide)
    with pytest.raises(HpctrainError, match="base: must be the path of a file, not a list"):
        hpctrain.make_deck([])  # type: ignore[arg-type]
    with pytest.raises(HpctrainError, match=r"is a folder \(name a file\)"):
        hpctrain.make_deck(SIZES, file=tmp_path)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_make_different_decks_are_told(world: World) -> None:
    deck = hpctrain.make_deck(SIZES, changes={"run.seed": world.rank})
    with pytest.raises(HpctrainError, match="the deck differs between ranks"):
        hpctrain.run(deck, world=world)
