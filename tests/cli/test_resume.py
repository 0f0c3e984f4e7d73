"""Tests of `resume` and other verbs on a finished run whose deck is changed on the command line."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.small_work import small_deck, write_small_work

Hpctrain = Callable[..., "subprocess.CompletedProcess[str]"]

TABLES: dict[str, dict[str, Any]] = {
    "run": {"steps": 4},
    "model": {"family": "llama", "mlp": 24},
    "batch": {"global_size": 2, "micro_size": None},
    "learning_rate": {"warmup": 0},
    "checkpoint": {"every": 2},
}
CHECKPOINTS = Path("runs/small/checkpoints")
TRAINED = f"{CHECKPOINTS}/step-00000004.h5 was trained with"
TWO_CHANGES = ("--set", "model.layers=3", "--set", "model.rope_base=500")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a text, a deck and, after the first use of `hpctrain`, a finished run."""
    folder = tmp_path_factory.mktemp("work")
    write_small_work(folder, **TABLES)
    return folder


@pytest.fixture
def hpctrain(work: Path, launch: Hpctrain) -> Hpctrain:
    """Function that runs `hpctrain` with its arguments in `work`, after the run has finished."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return launch(0, "-m", "hpctrain", *arguments, cwd=work)

    if not (work / "runs").exists():
        assert run("prepare", "tokens.h5", "text.txt").returncode == 0
        assert run("run", "deck.toml").returncode == 0
    return run


def test_resume_refuses_another_model(work: Path, hpctrain: Hpctrain) -> None:
    done = hpctrain("resume", "runs/small", *TWO_CHANGES, "--set", "run.steps=6")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"hpctrain: error: --set model.layers=3: {TRAINED} 2, and another value changes its parameters "
        "(expected 2)",
        f"hpctrain: error: --set model.rope_base=500: {TRAINED} 10000.0, and another value changes what its "
        "parameters compute (a new run can start from its weights with [model] from = "
        f'"{CHECKPOINTS}/step-00000004.h5")',
    ]
    assert sorted(path.name for path in (work / CHECKPOINTS).glob("step*")) == [
        "step-00000002.h5",
        "step-00000004.h5",
    ]


def test_edited_deck_is_refused(work: Path, hpctrain: Hpctrain) -> None:
    (work / "edited.toml").write_text(small_deck(**TABLES).replace("heads = 2", "heads = 4"))
    done = hpctrain("run", "edited.toml", "--resume", "--set", "run.title=small", "--set", "run.steps=6")
    assert done.returncode == 2
    assert f"edited.toml:8: model.heads = 4: {TRAINED} 2, and another" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [("evaluate", "runs/small", "--tokens", "tokens.h5"), ("replay", f"{CHECKPOINTS}/step-00000002.h5")],
)
def test_verbs_that_read_a_model_refuse_to_change_it(command: tuple[str, ...], hpctrain: Hpctrain) -> None:
    done = hpctrain(*command, *TWO_CHANGES)
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.splitlines()) == 2
    assert "--set model.rope_base=500: " in done.stderr and "was trained with 10000.0" in done.stderr


def test_extended_run_warns_that_the_learning_rate_rises(work: Path, hpctrain: Hpctrain) -> None:
    done = hpctrain("resume", "runs/small", "--set", "run.steps=8", "--set", "run.dir=runs/longer")
    assert done.returncode == 0, done.stderr
    log = " ".join((work / "runs/longer/log.txt").read_text().split())
    rises = (
        "--set run.steps=8: the learning rate rises from 6.95e-05 in step 4 to 1.65e-04 in step 5 "
        "(--set learning_rate.decay_steps=4 keeps the schedule of the checkpoint)"
    )
    assert rises in log and log.index(rises) < log.index("resumes from")
