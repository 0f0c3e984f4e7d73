"""`status.json` while a run goes, and what `hpctrain status` makes of it.

Tests of watch/status.py, watch/statuses.py and watch/evaluation_text.py.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from hpctrain.checkpoint.names import checkpoint_path
from hpctrain.checkpoint.save import save
from hpctrain.cli.status import command
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.train import checkpoints as checkpoints_module
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.run import run_deck
from hpctrain.watch import status as module
from hpctrain.watch.evaluation_text import evaluation_line
from hpctrain.watch.folder import lock_folder
from hpctrain.watch.run_files import MARKER
from hpctrain.watch.status import Status, job_name
from hpctrain.watch.statuses import read_status, statuses_text
from tests.checkpoint.conftest import entry
from tests.train.test_run import deck_file

__all__ = ["deck_file"]


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def ago(seconds: float) -> str:
    """The UTC time so many seconds ago, as a run writes it."""
    return (datetime.now(timezone.utc) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def write(folder: Path, **fields: Any) -> Path:
    """A run's folder with a status, of a run on this node unless said otherwise."""
    folder.mkdir(exist_ok=True)
    usual = {"state": "running", "step": 30, "steps": 100, "loss": 2.5, "tokens_per_s": 1234.0}
    usual |= {"seconds_left": 70.0, "step_seconds": 1.0, "ranks": 2, "host": socket.gethostname(), "pid": 7}
    usual |= {"time": ago(1), "step_time": ago(2), "job": "Slurm 12", "checkpoint": None}
    (folder / "status.json").write_text(json.dumps(usual | fields))
    return folder


@pytest.mark.mpi(min_size=1)
def test_what_a_run_says_while_it_trains(
    world: World, deck_file: Path, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    written = Status._write
    monkeypatch.setattr(Status, "_write", lambda self: (states.append(self._fields["state"]), written(self)))
    monkeypatch.setattr(module, "SECONDS_PER_RENEWAL", 1e9)
    folder = mpi_tmp_path / "run"
    assert run_deck(world, deck_file, [f"run.dir={folder}", "run.steps=10"]) == 0
    if world.rank > 0:
        return
    # The first step; after the last one an evaluation, what it found, a checkpoint.
    assert states == ["starting", "running", "evaluating", "running", "checkpointing", "running", "done"]
    found = read(folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert (
        found.items()
        >= {
            "state": "done",
            "title": "small",
            "step": 10,
            "steps": 10,
            "loss": rows[-1]["loss"],
            "tokens_per_s": rows[-1]["tokens_per_s"],
            "step_seconds": max(row["seconds"] for row in rows),
            "seconds_left": 0.0,
            "ranks": world.size,
            "nodes": world.nodes,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "checkpoint": str(folder / "checkpoints" / "step-00000010.h5"),
        }.items()
    )
    assert found["started"] <= found["step_time"] <= found["time"]
    assert not list(folder.glob("status.json.*"))


@pytest.mark.mpi(min_size=1)
def test_a_run_that_fails_says_why(
    world: World, deck_file: Path, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Checkpoints, state: object) -> None:
        raise InputOutputError("the disk is full")

    monkeypatch.setattr(Checkpoints, "save", refuse)
    with pytest.raises(InputOutputError):
        run_deck(world, deck_file, [f"run.dir={mpi_tmp_path}/run", "run.steps=2"])
    world.everyone.barrier()
    found = read(mpi_tmp_path / "run")
    assert (found["state"], found["reason"], found["step"]) == ("failed", "the disk is full", 2)


def test_it_is_renewed_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    status = Status(tmp_path, {"steps": 9})
    status.step(step=1, loss=float("nan"))
    status.flush()
    assert (read(tmp_path)["state"], read(tmp_path)["step"], read(tmp_path)["loss"]) == ("running", 1, None)
    now = 100.9
    status.step(step=2)
    status.flush()
    assert read(tmp_path)["step"] == 1
    now = 101.0
    status.step(step=3)
    status.flush()
    assert read(tmp_path)["step"] == 3
    status.change("checkpointing")
    assert read(tmp_path)["state"] == "checkpointing"
    status.change("running", checkpoint="x.h5")
    assert (read(tmp_path)["state"], read(tmp_path)["checkpoint"]) == ("running", "x.h5")


def test_a_disk_that_refuses_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "status.json.new").mkdir()
    status = Status(tmp_path, {})
    status.change("running")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "status.json: cannot be written and is out of date from now on: " in caplog.text


def test_jobs_of_schedulers() -> None:
    assert job_name({}) is None
    assert job_name({"SLURM_JOB_ID": "12"}) == "Slurm 12"
    assert job_name({"PBS_JOBID": "3.head"}) == "PBS 3.head"


def test_a_run_with_a_job_runs_or_stalls(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    with lock_folder(folder):
        assert read_status(folder)["state"] == "running"
        write(folder, step_time=ago(100), step_seconds=5.0)
        assert read_status(folder)["state"] == "stalled"
        write(folder, step_time=ago(100), step_seconds=20.0)  # slow steps
        assert read_status(folder)["state"] == "running"
        write(folder, step_time=ago(1000), state="checkpointing")
        assert read_status(folder)["state"] == "checkpointing"


def test_a_run_whose_job_is_gone_is_lost(tmp_path: Path) -> None:
    for state in ("starting", "running", "checkpointing", "evaluating"):
        assert read_status(write(tmp_path / "run", state=state))["state"] == "lost"
    for state in ("stopped", "done", "failed"):
        assert read_status(write(tmp_path / "run", state=state))["state"] == state
    # Locks may not reach other nodes: there only a long silence tells.
    folder = write(tmp_path / "run", host="elsewhere")
    assert read_status(folder)["state"] == "running"
    assert read_status(write(folder, host="elsewhere", time=ago(100)))["state"] == "lost"
    with lock_folder(folder):
        assert read_status(folder)["state"] == "running"


def test_looking_keeps_no_job_out(tmp_path: Path) -> None:
    """Who looks holds the lock for a moment, which a job that begins just then waits for."""
    folder = write(tmp_path / "run")
    lock_folder(folder).close()
    look = (folder / "lock").open(encoding="utf-8")
    fcntl.flock(look, fcntl.LOCK_SH)
    timer = threading.Timer(0.02, look.close)
    timer.start()
    with lock_folder(folder):
        timer.join()
        assert read_status(folder)["state"] == "running"


def test_the_table(tmp_path: Path) -> None:
    slow = {"rank": 3, "node": "n2", "times": 2.0, "words": "rank 3 on n2 computes for 2 s a step"}
    first = write(tmp_path / "first", stragglers=[slow])
    with lock_folder(first):
        rows = [read_status(first)]
    for name in ("second", "third run"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "checkpoints" / "step-00000030.h5").touch()
    told, saved = "SIGUSR2 was received by rank 1", "step-00000030.h5"
    stopped = write(tmp_path / "second", state="stopped", job=None, reason=told, checkpoint=saved)
    lost = write(tmp_path / "third run", loss=None, step_time=None, checkpoint=saved)
    rows += [read_status(stopped), read_status(lost)]
    text = statuses_text(rows).replace(f"{tmp_path}/", "").splitlines()
    cells = [line.split() for line in text]
    assert cells[1][:9] == ["first", "running", "30/100", "2.5000", "1.23K", "1", "min", "10", "s"]
    assert "Slurm 12" in text[1]
    assert cells[2][:4] == ["second", "stopped", "30/100", "2.5000"]
    assert f"process 7 on {socket.gethostname()}" in text[2]
    assert cells[3][:6] == ["third", "run", "lost", "30/100", "2", "Slurm"]
    assert text[5:] == [
        "first: rank 3 on n2 computes for 2 s a step",
        "second: SIGUSR2 was received by rank 1",
        "second: resume with `hpctrain resume second`",
        "third run: its job ended without writing its state",
        "third run: resume with `hpctrain resume 'third run'`",
    ]


@pytest.mark.mpi(min_size=1, max_size=1)
def test_the_newest_good_checkpoint_is_named(world: World, tmp_path: Path) -> None:
    """Whatever the run could still write about it."""
    folder = write(tmp_path / "run", state="failed")
    assert (read_status(folder)["checkpoint"], read_status(folder)["go_on"]) == (None, "")
    (folder / "deck.toml").touch()
    assert read_status(folder)["go_on"] == f"hpctrain run {folder}/deck.toml"
    (folder / "checkpoints").mkdir()
    paths = [checkpoint_path(folder / "checkpoints", step) for step in (10, 20, 30)]
    paths[2].write_bytes(b"damaged")
    assert read_status(folder)["go_on"] == f"hpctrain run {folder}/deck.toml --fresh"
    held = [entry("a", torch.arange(5.0))]
    save(paths[0], world.everyone, held, {"step": 10})
    assert read_status(folder)["checkpoint"] == str(paths[0])
    save(paths[1], world.everyone, held, {"step": 20})
    write(folder, state="failed", checkpoint=str(paths[0]))
    assert read_status(folder)["checkpoint"] == str(paths[1])
    assert read_status(folder)["go_on"] == f"hpctrain resume {folder}"
    # A run that went on from another folder's checkpoint has none of its own yet.
    other = write(tmp_path / "other", state="failed", checkpoint=str(paths[0]))
    assert read_status(other)["go_on"] == f"hpctrain resume {paths[0]} --set run.dir={other}"


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("mode", ["collective", "background"])
def test_a_checkpoint_that_is_complete_is_named_whatever_follows(
    world: World, deck_file: Path, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    def refuse(path: Path, _group: object) -> None:
        if path.name == "step-00000004.h5":
            raise InputOutputError("no space left for the link")

    monkeypatch.setattr(checkpoints_module, "try_point_to", refuse)
    folder = mpi_tmp_path / "run"
    keys = [f"run.dir={folder}", "run.steps=9", "checkpoint.every=2", f"checkpoint.mode={mode}"]
    with pytest.raises(InputOutputError, match="no space left"):
        run_deck(world, deck_file, keys)
    assert read(folder)["checkpoint"] == str(folder / "checkpoints" / "step-00000004.h5")


@pytest.mark.mpi(min_size=1, max_size=1)
def test_a_run_without_updates_is_repeated_from_before_them(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [checkpoint_path("run/checkpoints", step) for step in (10, 20, 30)]
    Path("run/checkpoints").mkdir(parents=True)
    for path in paths:
        save(path, world.everyone, [entry("a", torch.arange(5.0))], {"step": int(path.stem[5:])})
    why = {"state": "failed", "job": None, "checkpoint": str(paths[2])}
    write(Path("run"), **why, last_update=25, reason="run: the last 5 steps made no update")
    row = read_status(Path("run"))
    assert (row["go_on"], row["checkpoint"]) == (f"hpctrain resume {paths[1]}", str(paths[2]))
    assert statuses_text([row]).splitlines()[-2:] == [
        "run: the last 5 steps made no update",
        "run: change what `hpctrain guide loss-spikes` names, and repeat these steps with `hpctrain resume "
        f"{paths[1]} --set KEY=VALUE`",
    ]
    write(Path("run"), **why, last_update=0, reason=f"{tmp_path / 'run'}: it made no update: none")
    Path("run/deck.toml").touch()
    row = read_status(Path("run"))
    assert row["go_on"] == "hpctrain run run/deck.toml --fresh"
    assert "\nrun: it made no update: none\n" in statuses_text([row])
    write(Path("run"), **why, reason="other/run: is full")
    assert "\nrun: other/run: is full\n" in statuses_text([read_status(Path("run"))])


def test_what_is_no_status_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000010.h5").touch()
    for fields in ({"step_time": "yesterday"}, {"step_seconds": "long"}, {"checkpoint": 7}):
        folder = write(tmp_path / "run", **fields)
        with pytest.raises(InputOutputError, match="is not the status of a run"):
            read_status(folder)
    (folder / "status.json").write_text("[" * 100_000)
    with pytest.raises(InputOutputError, match="is not the status of a run"):
        read_status(folder)


def test_nodes_that_are_not_trusted_are_named_for_scripts(tmp_path: Path) -> None:
    ranks = [
        {"rank": 0, "node": "n1.cluster", "faults": 1},
        {"rank": 1, "node": "n2.cluster", "faults": 3},
        {"rank": 3, "node": "n2.cluster", "faults": 4},
        {"rank": 4, "node": "n\x1b[2J.cluster", "faults": 2},
    ]
    folder = write(tmp_path / "run", faulty=ranks)
    done = CliRunner().invoke(command, [str(folder), "--faulty"], standalone_mode=False)
    assert (done.exit_code, done.output) == (0, "n2,n\\u001B[2J\n")
    for damaged in (7, ["x"], [{"rank": 1}], [{"node": 3, "faults": 2}], [{"node": "n1", "faults": "2"}]):
        write(tmp_path / "run", faulty=damaged)
        done = CliRunner().invoke(command, [str(folder), "--faulty"], standalone_mode=False)
        assert isinstance(done.exception, InputOutputError), damaged
    done = CliRunner().invoke(command, [str(tmp_path), "--faulty"], standalone_mode=False)
    assert isinstance(done.exception, HpctrainError)
    assert done.exception.exit_code == 2
    done = CliRunner().invoke(command, [str(tmp_path / "none"), "--faulty"], standalone_mode=False)
    assert isinstance(done.exception, InputOutputError)
    assert done.exception.problems == (f"{tmp_path / 'none'}: no such run folder",)
    done = CliRunner().invoke(command, [str(folder), "--faulty", "--json"])
    assert done.exit_code == 2


def test_in_few_columns_it_is_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    folder = write(tmp_path / "a run of quite some length")
    (folder / "deck.toml").touch()
    lines = statuses_text([read_status(folder.relative_to(tmp_path))]).splitlines()
    assert max(len(line) for line in lines if "`" not in line) <= 60
    assert lines[:3] == ["a run of quite some length", "  state       lost", "  step        30/100"]
    assert lines[-4:] == [  # a command stays whole, to be copied
        "a run of quite some length: its job ended without writing",
        "  its state",
        "a run of quite some length: resume with",
        "  `hpctrain run 'a run of quite some length/deck.toml'`",
    ]


def test_the_verb_shows_all_it_can_read(tmp_path: Path) -> None:
    good, torn = write(tmp_path / "good", state="done"), tmp_path / "torn"
    torn.mkdir()
    (torn / "status.json").write_text('{"state": ')
    folders = [str(good), str(torn), str(tmp_path / "none")]
    done = CliRunner().invoke(command, [*folders, "--json"], standalone_mode=False)
    assert isinstance(done.exception, InputOutputError)
    assert [problem.split(": ")[1][:22] for problem in done.exception.problems] == [
        "is not the status of a",
        "no such run folder",
    ]
    (row,) = json.loads(done.output)
    assert (row["folder"], row["state"], row["loss"]) == (str(good), "done", 2.5)
    done = CliRunner().invoke(command, folders[:1], standalone_mode=False)
    assert done.exit_code == 0
    assert done.output.splitlines()[1].split()[:3] == [str(good), "done", "30/100"]


def test_files_and_folders_of_other_things_beside_runs_are_passed_over(tmp_path: Path) -> None:
    """As in `hpctrain status runs/*`, also in the folder of a sweep, where each run has a file beside it."""
    good, other, begun = write(tmp_path / "good", state="done"), tmp_path / "tokens", tmp_path / "begun"
    other.mkdir()
    begun.mkdir()
    (begun / MARKER).touch()
    (output := tmp_path / "good.out").touch()
    done = CliRunner().invoke(command, [str(good), str(other), str(output), "--json"], standalone_mode=False)
    assert done.exit_code == 0
    assert [row["folder"] for row in json.loads(done.output)] == [str(good)]
    for folders, code in (([other], 2), ([output], 2), ([good, begun], 3)):
        done = CliRunner().invoke(command, list(map(str, folders)), standalone_mode=False)
        assert isinstance(done.exception, HpctrainError)
        assert done.exception.exit_code == code
        assert str(folders[-1] / "status.json") in done.exception.problems[0]


def test_status_does_without_torch(launch: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    program = "import sys, hpctrain.watch.statuses; print('torch' in sys.modules)"
    assert launch(0, "-c", program, cold=True).stdout == "False\n"


def test_a_perplexity_is_told_as_a_number_that_people_read() -> None:
    told = {
        3.0: "3.000",
        999.0: "999.000",
        1600.0: "1600.0",
        2e9: "2.0e+09",
        math.inf: "inf",
        math.nan: "nan",
    }
    for perplexity, text in told.items():
        line = evaluation_line("books", {"loss": 1.0, "perplexity": perplexity})
        assert line == f"books loss 1.0000  perplexity {text}"
