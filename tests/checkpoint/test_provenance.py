"""The chain of runs that a checkpoint tells, and the commit of the code, against git itself."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from hpctrain.checkpoint.provenance import (
    LOSSES,
    SEGMENTS,
    HistorySegment,
    Provenance,
    RecordedLoss,
    history,
    losses,
)
from hpctrain.checkpoint.versions import commit_of


def begin(title: str) -> Provenance:
    return Provenance(title, f"runs/{title}", {"data": 2, "zero": 0}, 2, 30, {"functions": title})


def test_every_resume_appends_to_the_chain() -> None:
    state: dict[str, object] = {}
    for number in range(3):
        run = begin(f"run{number}")
        if number:
            run.continue_from({"step": 10 * number, **state}, f"a/step-{10 * number}.h5")
        for step in range(10 * number + 1, 10 * number + 11):
            run.record(step, 1 / step, 2 / step)
        state = json.loads(json.dumps(run.stored(10 * number + 10), allow_nan=False))
    found = history(state)
    assert [(s.title, s.first_step, s.last_step, s.went_on_from) for s in found] == [
        ("run0", 1, 10, None),
        ("run1", 11, 20, "a/step-10.h5"),
        ("run2", 21, 30, "a/step-20.h5"),
    ]
    assert found[0].layout == {"data": 2, "zero": 0}
    assert found[0].versions["torch"]
    assert [(s.steps, s.computed) for s in found] == [(30, {"functions": f"run{n}"}) for n in range(3)]
    assert losses(state) == [RecordedLoss(step, 1 / step, 2 / step) for step in range(1, 31)]


def test_what_is_stored_is_bounded() -> None:
    state: dict[str, object] = {"step": 0}
    first = begin("first")
    for step in range(1, 151):
        first.record(step, float("nan"), float("inf"))
    state = first.stored(150)
    assert len(state["history"]) == 1
    rows = state["history"] * (SEGMENTS + 500)
    run = begin("x" * 5000)
    run.continue_from({"step": 150, "history": rows, "losses": state["losses"]}, "y" * 5000)
    stored = run.stored(160)
    assert len(stored["history"]) == SEGMENTS
    assert stored["history"][0]["title"] == "first"
    assert len(stored["history"][-1]["title"]) == len(stored["history"][-1]["went_on_from"]) == 300
    assert [loss.step for loss in losses(stored)] == list(range(151 - LOSSES, 151))
    assert losses(stored)[-1] == RecordedLoss(150, None, None)
    json.dumps(stored, allow_nan=False)


def test_a_state_of_other_making_is_no_history() -> None:
    good = begin("good").stored(3)["history"][0]
    for wrong in ({"ranks": "2"}, {"layout": None}, {"title": 3}, {"commit": 7}, {"computed": 1}):
        assert HistorySegment.of(good | wrong) is None
    older = HistorySegment.of({name: value for name, value in good.items() if name != "computed"})
    assert older is not None and older.computed == {}
    rows = [good, 3, None, {}, {"title": "half"}]
    assert [segment.title for segment in history({"history": rows})] == ["good"]
    assert history({}) == history({"history": "text"}) == []
    assert losses({"losses": [{"step": 1, "loss": "x"}, 3]}) == [RecordedLoss(1, None, None)]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is the reference")
def test_the_commit_is_the_one_that_git_tells(tmp_path: Path) -> None:
    def git(folder: Path, *arguments: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        done = subprocess.run(["git", *name, *arguments], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    plain, tree = tmp_path / "plain", tmp_path / "tree"
    plain.mkdir()
    assert commit_of(plain) is None
    git(plain, "init")
    assert commit_of(plain) is None  # nothing committed
    for message in ("one", "two"):
        git(plain, "commit", "--allow-empty", "-m", message)
    git(plain, "worktree", "add", str(tree), "-b", "side/branch")
    git(tree, "commit", "--allow-empty", "-m", "three")
    expected = [git(folder, "rev-parse", "HEAD") for folder in (plain, tree)]
    assert expected[0] != expected[1]
    assert [commit_of(plain), commit_of(tree)] == expected
    git(plain, "pack-refs", "--all")
    assert [commit_of(plain), commit_of(tree)] == expected
    git(plain, "checkout", "--detach", "HEAD~1")
    assert commit_of(plain) == git(plain, "rev-parse", "HEAD") != expected[0]
    (plain / "inside").mkdir()
    assert commit_of(plain / "inside") is None
