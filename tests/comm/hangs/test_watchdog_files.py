"""A rank that does not return from opening or closing a file on all ranks ends the job."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.comm.calls import Call
from hpctrain.comm.hangs import watchdog
from hpctrain.comm.hangs.hang_report import CallNote, GroupNote, HangReport, diagnose, take_report
from hpctrain.comm.hangs.hang_settings import HANG_SECONDS_VARIABLE
from hpctrain.comm.hangs.watchdog import Watchdog
from hpctrain.comm.world import World

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

# Opens a file on all ranks in the two ways of hpctrain; rank 1 sleeps in the named function.
PROGRAM = """
import os, sys, tempfile, time
from pathlib import Path
import h5py
from hpctrain.comm import parallel_files
from hpctrain.comm.verb import run_verb

tempfile.tempdir = os.environ["TMPDIR"]  # a warm process has asked for it before

class Sleeper:
    Open = staticmethod(lambda *_: time.sleep(1000))

def verb(world):
    path, function = Path("file.h5"), sys.argv[1]
    if world.rank == 0:
        h5py.File(path, "w").close()
    elif function == "MPI.File":
        parallel_files.MPI.File = Sleeper
    else:
        setattr(parallel_files, function, Sleeper.Open)
    world.everyone.barrier()
    world.ledger.activity = "saving"
    parallel_files.require_parallel_files(world, Path())
    with parallel_files.open_on_all_ranks(path, world.everyone):
        pass

run_verb(verb)
"""


@pytest.mark.parametrize(
    ("function", "call", "file"),
    [
        ("MPI.File", "open_file", ".mpi-"),
        ("open_file", "open_file", "file.h5"),
        ("close_file", "close_file", "file.h5"),
    ],
)
def test_a_rank_that_a_file_system_blocks_is_named_with_the_file(
    launch: Launch, tmp_path: Path, function: str, call: str, file: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {HANG_SECONDS_VARIABLE: "1", "TMPDIR": str(tmp_path)}
    done = launch(2, "program.py", function, own_end=True, **environment)
    assert done.returncode == 70, (done.returncode, done.stdout, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines[0].startswith("error: the run hangs while saving: "), done.stderr
    assert lines[1].startswith("error: rank 1 on "), done.stderr
    assert f" waits for the file system in {call} " in lines[1], done.stderr
    assert f"of world (ranks 0-1; {file}" in lines[1], done.stderr


WORLD = ("world", (0, 1), 0)
OPEN = CallNote(WORLD, "open_file", 7, 0, "", -1, 3.0, "a.h5")


def report(rank: int, current: CallNote, entered: int = 7) -> HangReport:
    groups = (GroupNote(WORLD, entered, {}, {}),)
    return HangReport("token", rank, "node", 3.0, "saving", "line 1", current, (OPEN, current), groups)


def test_a_call_that_failed_on_one_rank_explains_why_the_others_wait() -> None:
    failed = replace(OPEN, error="Input/output error")
    next_call = CallNote(WORLD, "agreement", 8, 0, "", -1, 3.0)
    left = replace(report(1, next_call, 8), recent=(failed, next_call))
    assert diagnose({0: report(0, OPEN), 1: left}, 2)[0] == (
        "open_file 7 of world (ranks 0-1; a.h5) failed on rank 1 on node (Input/output error), and rank 0 "
        "waits in it"
    )


def test_a_call_that_returns_on_no_rank_is_named() -> None:
    assert diagnose({rank: report(rank, OPEN) for rank in (0, 1)}, 2)[0] == (
        "open_file 7 of world (ranks 0-1; a.h5) has not returned on any rank; MPI has probably failed in it "
        "on one of them"
    )


def test_the_reason_of_a_failed_call_is_reported(world: World) -> None:
    own = world.single_rank_world()
    with pytest.raises(OSError, match="no reason"), own.everyone.watched_call("open_file", Path("a.h5")):
        raise OSError("no reason")
    note = take_report(own, "token", 0.0).recent[-1]
    assert (note.file, note.error) == ("a.h5", "no reason")


def test_a_disk_is_waited_for_longer_except_where_all_ranks_open_a_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = world.single_rank_world()
    own.hang.set_limit(2.0)
    dog = Watchdog(own)
    assert dog._patience() == 2.0
    monkeypatch.setattr(watchdog, "_waits_for_disk", lambda: True)
    assert dog._patience() == 2.0 * watchdog._DISK_PATIENCE
    own.everyone.calls.enter(Call("open_file", file="a.h5"))
    assert dog._patience() == 2.0


def test_a_process_that_waits_for_a_processor_works(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/7/stat": f"7 (python) R {' '.join(['0'] * 10)} 0 0",
        "/proc/7/schedstat": "50 1500000000 3",
    }
    monkeypatch.setattr(Path, "read_text", lambda path, **_: texts[str(path)])
    assert watchdog._state_of(7) == ("R", 1.5)
