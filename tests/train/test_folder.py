"""The folder of a run: what may be removed, and that two jobs never write to one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError
from hpctrain.train.folder import lock_folder, refuse_other_run, remove_run
from tests.train.test_run import DECK


def test_fresh_removes_runs_only(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years of work")
    with pytest.raises(HpctrainError, match="holds no run"):
        remove_run(tmp_path / "precious")
    assert (tmp_path / "precious" / "thesis.tex").exists()
    remove_run(tmp_path / "absent")


def test_a_deck_is_refused_where_a_run_is(tmp_path: Path) -> None:
    deck = parse_deck(DECK.format(tokens="x"), [f"run.dir={tmp_path}"])
    refuse_other_run(deck)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(HpctrainError, match="hpctrain resume"):
        refuse_other_run(deck)


def test_two_jobs_never_write_to_one_folder(
    tmp_path: Path, launch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The second one ends at once, whatever it was to do; the lock of a job that ended holds nothing."""
    (tmp_path / "text.txt").write_text("hello world, " * 300)
    (tmp_path / "small.toml").write_text(DECK.format(tokens="tokens.h5"))
    assert launch(0, "-m", "hpctrain", "prepare", "tokens.h5", "text.txt").returncode == 0
    keys = ("--set", "run.dir=run", "--set", "run.steps=2")
    assert launch(0, "-m", "hpctrain", "run", "small.toml", *keys).returncode == 0
    with lock_folder(tmp_path / "run"):
        for command in (("resume", "run"), ("run", "small.toml", "--fresh")):
            done = launch(2, "-m", "hpctrain", *command, *keys, "--set", "run.steps=4")
            assert done.returncode == 2, done.stderr
            assert done.stderr.count("another job writes to this run folder (process ") == 1
    assert (tmp_path / "run" / "checkpoints" / "step-00000002.h5").exists()
    done = launch(0, "-m", "hpctrain", "resume", "run", "--set", "run.steps=4")
    assert done.returncode == 0, done.stderr
