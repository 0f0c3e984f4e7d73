"""Tests that a rank which is stopped before all ranks have met ends the job."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.comm.hangs import start_watch
from hpctrain.comm.hangs.hang_settings import HANG_SECONDS_VARIABLE
from hpctrain.comm.hangs.start_watch import describe_start, rank_states

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

# Starts the World. Rank 1 is stopped before it starts MPI, before it makes its World, after that in a script,
# or after an error because of which there is no World.
PROGRAM = """
import os, signal, sys
from hpctrain.comm import verb, world
from hpctrain.errors import HpctrainError

def stop(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)

def fail(*_):
    raise HpctrainError("other ranks")

place = sys.argv[1]
if place == "error":
    world.check_launched_size = fail
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    owner, name = {
        "MPI": (world, "start_mpi"),
        "World": (world.World, "__init__"),
        "script": (world.World, "set_up"),
        "error": (verb, "finalize_mpi"),
    }[place]
    setattr(owner, name, stop)
if place == "script":
    world.World.start("cpu").finish()
else:
    verb.run_verb(lambda _: 0)
"""


@pytest.mark.parametrize("place", ["MPI", "World", "script", "error"])
def test_a_rank_that_is_stopped_at_its_start_is_named(launch: Launch, tmp_path: Path, place: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launch(2, "program.py", place, cold=True, **{HANG_SECONDS_VARIABLE: "1"})
    assert done.returncode == 70, (done.returncode, done.stdout, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines[0].startswith("error: the run hangs while starting: "), done.stderr
    assert lines[1].startswith("error: rank 1 on "), done.stderr
    assert lines[1].endswith("does not answer: its process is stopped, as by SIGSTOP or a debugger")


def test_several_stopped_ranks_are_named_and_a_start_without_any_is_told() -> None:
    assert " on " in describe_start(frozenset({3, 1}), 9.0, 0)[1]
    assert describe_start(frozenset({3, 1}), 9.0, 0)[1].startswith("ranks 1, 3 on ")
    assert describe_start(frozenset(), 600.0, 2)[0].endswith("have joined the others after 600 s")
    assert describe_start(frozenset(), 600.0, 2)[1].startswith("rank 2 on ")


def test_the_states_of_ranks_are_those_of_the_launchers_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = {
        11: "OMPI_COMM_WORLD_SIZE=2\0OMPI_COMM_WORLD_RANK=0\0",
        12: "OMPI_COMM_WORLD_SIZE=2\0OMPI_COMM_WORLD_RANK=1\0",
        13: "HOME=/\0",
    }
    for process, environment in environments.items():
        folder = tmp_path / str(process)
        folder.mkdir()
        (folder / "environ").write_text(environment)
        (folder / "stat").write_text(f"{process} (a (b) c) {'T' if process == 12 else 'R'} 1 1")
    monkeypatch.setattr(start_watch, "descendants", lambda _: iter([*environments, 14]))
    monkeypatch.setattr(start_watch, "PROC_FOLDER", tmp_path)
    assert rank_states(1) == {0: "R", 1: "T"}
