"""Hanging runs end by themselves and name the rank; runs that only take long go on.

Tests of comm/hangs/watchdog.py, comm/hangs/hang_report.py and comm/hangs/hang_settings.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.hangs import hang_report, watchdog
from hpctrain.comm.hangs.flight_recorder import RecordedCall
from hpctrain.comm.hangs.hang_report import (
    CallNote,
    GroupNote,
    HangReport,
    diagnose,
    read_report,
    take_report,
    write_report,
)
from hpctrain.comm.hangs.watchdog import REPORT_REQUEST, Watchdog
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from tests.data.preparing import prepare
from tests.small_work import write_small_work

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


HOOK = """
import os, signal, sys, time
from hpctrain.cli.main import main
from hpctrain.comm.group import Group

def hook(name, act):
    usual, seen = getattr(Group, name), []
    def changed(group, *arguments, **options):
        if group.ledger.phase in {{"forward", "backward"}} and "rank {rank} " in repr(group):
            seen.append(1)
            if len(seen) == 20:
                return act(group, *arguments, **options)
        return usual(group, *arguments, **options)
    setattr(Group, name, changed)

def fall_asleep(*_, **__):
    time.sleep(1000)

def be_stopped(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)

def meet_instead(group, *_):
    group.barrier()

hook("{name}", {act})
main()
"""


@pytest.fixture
def hang(launch: Launch, world: World, tmp_path: Path) -> Callable[..., tuple[str, Path]]:
    """A run of two ranks, one of which goes astray in its 20th call: stderr, and the run's folder."""
    write_small_work(tmp_path, run={"title": "hanging", "steps": 100}, stability={"hang_seconds": 2})
    prepare(world.single_rank_world(), tmp_path / "tokens.h5", [str(tmp_path / "text.txt")])

    def run(name: str, rank: int, act: str, *overrides: str) -> tuple[str, Path]:
        (tmp_path / "program.py").write_text(HOOK.format(name=name, rank=rank, act=act))
        sets = [part for override in overrides for part in ("--set", override)]
        done = launch(2, "program.py", "run", "deck.toml", *sets)
        assert done.returncode == 70, (done.returncode, done.stdout, done.stderr)
        return done.stderr, tmp_path / "runs" / "hanging"

    return run


def watch_training(
    world: World, folder: Path, seconds: float, on_hang: Callable[[str], None] = lambda _: None
) -> None:
    """Have the watchdog of this world write into the folder."""
    world.hang.set_limit(seconds)
    world.hang.report_to(folder, on_hang)


def test_a_rank_that_sleeps_in_a_collective_is_named(hang: Callable[..., tuple[str, Path]]) -> None:
    errors, folder = hang("start_all_reduce", 1, "fall_asleep")
    sentences = errors.splitlines()
    assert any(
        line.startswith("error: rank 1 on ")
        and "never entered all_reduce " in line
        and " of data x context (ranks 0-1; " in line
        and "in which rank 0 has waited for" in line
        for line in sentences
    ), errors
    assert "is in no communication call, at" in errors
    assert "program.py:17 in fall_asleep" in errors
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"].startswith("hang: rank 1 on ")
    log = (folder / "log.txt").read_text()
    assert "never entered all_reduce" in log
    stuck, waiting = ((folder / f"hang.{rank}.txt").read_text() for rank in (1, 0))
    assert "in fall_asleep" in stuck
    assert "it is in no communication call" in stuck
    assert "it is in all_reduce" in waiting
    assert "stack of MainThread" in waiting
    assert "stack of watchdog" not in waiting
    assert "called at hpctrain/sharding/synchronize.py:" in waiting
    for text in (stuck, waiting):
        last = text.split("last calls, newest first")[1].split("\n\n")[0].splitlines()[1:]
        assert len(last) == 10
        assert all(" s ago  " in line for line in last)


def test_the_first_incomplete_call_of_a_process_group_is_named(hang: Callable[..., tuple[str, Path]]) -> None:
    errors, folder = hang("start_all_reduce", 1, "fall_asleep", "communication.transport=gloo")
    waiting = next(line for line in errors.splitlines() if ", and waits for gloo:" in line)
    assert waiting.startswith("error: rank 0 on ")
    assert waiting.endswith(" of Float), shared with data x context to complete")
    assert " is in all_reduce " in waiting and " of data x context (" in waiting
    assert " of data ([" in waiting  # whose communicator it uses, with one context rank
    calls = (folder / "hang.0.txt").read_text().split("last calls of torch's process groups")[1].splitlines()
    assert calls[1].endswith(", incomplete")
    assert not calls[2].endswith(", incomplete")


def test_different_operations_are_both_named(hang: Callable[..., tuple[str, Path]]) -> None:
    errors, _ = hang("start_all_reduce", 1, "meet_instead")
    assert "error: the ranks make different calls: rank 0 called all_reduce " in errors
    assert "; rank 1 called barrier " in errors


def test_with_the_check_they_are_named_before_the_hang(hang: Callable[..., tuple[str, Path]]) -> None:
    errors, folder = hang(
        "start_all_reduce", 1, "meet_instead", "communication.check=true", "stability.hang_seconds=0"
    )
    named = "hpctrain: error: the ranks make different calls: rank 0 calls all_reduce "
    assert errors.count(named) == 1
    assert "; rank 1 calls barrier " in errors
    assert "Traceback" not in errors
    assert not list(folder.glob("hang.*"))


def test_a_stopped_rank_does_not_answer(hang: Callable[..., tuple[str, Path]]) -> None:
    errors, folder = hang("start_all_reduce", 0, "be_stopped")
    assert "error: rank 0 does not answer: its process is stopped, as by SIGSTOP or a debugger" in errors
    assert (folder / "hang.1.txt").exists()
    assert not (folder / "hang.0.txt").exists()
    assert "rank 0 does not answer" in (folder / "log.1.txt").read_text()


def test_a_missing_message_is_named_with_its_sender(hang: Callable[..., tuple[str, Path]]) -> None:
    errors, _ = hang("start_send", 0, "fall_asleep", "layout.pipeline=2")
    found = re.search(
        r"rank 1 waits .* in recv (\d+) from rank 0 of pipeline; .*; rank 0 has sent (\d+) message", errors
    )
    assert found, errors
    assert int(found[1]) == int(found[2]) + 1


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_works_excuses_those_that_wait(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_training(world, mpi_tmp_path, 0.6)
    dog = Watchdog(world)
    monkeypatch.setattr(Watchdog, "grace", 0.5)  # after which the waiting rank would end the job
    with dog, world.hang.training_steps():
        if world.rank == 0:
            asked = False
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                world.ledger.phase = "other"  # as the executor does with every action
                asked = asked or (mpi_tmp_path / REPORT_REQUEST).exists()
                time.sleep(0.002)
            assert asked
        world.everyone.barrier()
    world.everyone.barrier()
    assert not list(mpi_tmp_path.glob("hang.*"))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("way", ["computes", "waits for a person", "has a child that computes"])
def test_outside_of_steps_silent_work_excuses_those_that_wait(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    watch_training(world, mpi_tmp_path, 0.4)
    dog = Watchdog(world)
    monkeypatch.setattr(Watchdog, "grace", 0.3)
    until = time.monotonic() + 1.2
    with dog:
        if world.rank == 0 and way == "computes":
            while time.monotonic() < until:
                pass
        elif world.rank == 0 and way == "waits for a person":
            with world.hang.allow_silence():
                time.sleep(1.2)
        elif world.rank == 0:
            code = f"import time\nwhile time.monotonic() < {until}: pass"
            subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
        world.everyone.barrier()
    world.everyone.barrier()
    assert not list(mpi_tmp_path.glob("hang.*"))


def test_reports_stay_once_they_are_judged(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a launcher ends a job it lets stopped ranks go on, and so those that waited for them."""
    ended = list[int]()

    def abort(ending: World, code: int) -> None:
        ending.ledger.calls.signs_of_life += 1
        ended.append(code)

    monkeypatch.setattr(World, "abort", abort)
    monkeypatch.setattr(watchdog, "_exit_after", lambda _: threading.Timer(0, ended.clear))
    own = world.single_rank_world()
    watch_training(own, tmp_path, 1.0)
    own.hang.training = True
    Watchdog(own)._report_hang(1.0)
    assert ended == [70]
    assert (tmp_path / "hang.0.txt").exists()


def test_where_rank_0_is_stopped_the_lowest_rank_tells_of_all_that_answer(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()

    def abort(ending: World, _: int) -> None:
        ending.ledger.calls.signs_of_life += 1

    monkeypatch.setattr(World, "abort", abort)
    monkeypatch.setattr(watchdog, "_exit_after", lambda _: threading.Timer(0, told.clear))
    monkeypatch.setattr(watchdog.os, "_exit", lambda _: None)  # of a rank that nobody ends in time
    own = world.single_rank_world()
    own.rank, own.size = 1, 4
    watch_training(own, tmp_path, 1.0, told.append)
    own.hang.training = True
    dog = Watchdog(own)
    monkeypatch.setattr(Watchdog, "grace", 0.0)
    for rank in (2, 3):
        write_report(tmp_path / f"hang.{rank}.txt", replace(report(rank, None), token=""), own.size)
    dog._report_hang(1.0)
    assert told == [
        "hang: rank 0 does not answer: its process is dead or stopped, or cannot write to the folder of the "
        "reports (while starting)"
    ]


def test_work_from_before_the_meter_does_not_count() -> None:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    meter = watchdog._WorkMeter()
    time.sleep(0.2)
    assert not meter.is_working()


def test_a_report_is_read_as_it_was_written(world: World, tmp_path: Path) -> None:
    own = World(world.communicator.Dup()) if world.size > 1 else world.single_rank_world()
    group = own.ledger.calls.add_group("data", (0, 4, 8))
    group.enter(Call("all_reduce", torch.zeros(20, dtype=torch.bfloat16)))
    group.leave()
    group.enter(Call("recv", None, torch.zeros(5), peer=2))
    report = take_report(own, "token", 2.5)
    assert report.current is not None
    assert str(report.current) == "recv 1 from rank 8 of data; 20 bytes of float32"
    assert str(report.recent[0]) == "all_reduce 1 of data (ranks 0, 4, 8; 40 bytes of bfloat16)"
    write_report(tmp_path / "hang.0.txt", report, 9)
    assert read_report(tmp_path / "hang.0.txt", "token") == report
    assert read_report(tmp_path / "hang.0.txt", "another run") is None
    assert read_report(tmp_path / "hang.1.txt", "token") is None


DATA = ("data", (0, 1), 0)
TENSOR = ("tensor", (1, 2, 3), 0)


def call(key: tuple[str, tuple[int, ...], int], number: int, operation: str = "all_reduce") -> CallNote:
    return CallNote(key, operation, number, 40, "float32", -1, 7.0)


def report(rank: int, current: CallNote | None, **entered: int) -> HangReport:
    keys = {"data": DATA, "tensor": TENSOR}
    groups = tuple(GroupNote(keys[name], count, {}, {}) for name, count in entered.items())
    recent = () if current is None else (current,)
    return HangReport(
        "token", rank, f"node{rank // 2}", 7.0, "backward", f"line {rank}", current, recent, groups
    )


def test_the_rank_at_the_end_of_a_chain_comes_first() -> None:
    reports = {
        0: report(0, call(DATA, 5), data=5),
        1: report(1, call(TENSOR, 9), data=4, tensor=9),
        2: report(2, call(TENSOR, 9), tensor=9),
        3: report(3, None, tensor=8),
    }
    lines = diagnose(reports, 4)
    assert lines[:2] == [
        "rank 3 on node1 never entered all_reduce 9 of tensor (ranks 1-3; 40 bytes of float32), "
        "in which ranks 1-2 have waited for 7.0 s",
        "rank 1 on node0 never entered all_reduce 5 of data (ranks 0-1; 40 bytes of float32), "
        "in which rank 0 has waited for 7.0 s",
    ]
    assert lines[2] == "rank 3 on node1 is in no communication call, at line 3"
    assert len(lines) == 6


def test_where_nobody_is_seen_waiting_the_counts_tell() -> None:
    """As on a GPU, where calls return before they are done."""
    ahead = HangReport(
        "token",
        0,
        "a",
        7.0,
        "step",
        "line",
        None,
        (call(DATA, 6, "broadcast"),),
        (GroupNote(DATA, 6, {}, {}),),
    )
    assert diagnose({0: ahead, 1: report(1, None, data=5)}, 2)[0] == (
        "rank 1 on node0 never entered broadcast 6 of data (ranks 0-1; 40 bytes of float32), "
        "which rank 0 entered"
    )


def test_of_thousands_of_ranks_a_few_lines_tell() -> None:
    ranks = tuple(range(3000))
    key = ("world", ranks, 0)
    reports = {
        rank: HangReport(
            "token",
            rank,
            "node",
            7.0,
            "step",
            "line",
            call(key, 5) if rank != 1234 else None,
            (),
            (GroupNote(key, 5 - (rank == 1234), {}, {}),),
        )
        for rank in ranks
        if rank != 77
    }
    lines = diagnose(reports, 3000)
    assert lines[0].startswith("rank 77 does not answer")
    assert lines[1].startswith("rank 1234 on node never entered all_reduce 5 of world (ranks 0-2999;")
    assert lines[1].endswith("in which ranks 0-76, 78-1233, 1235-2999 have waited for 7.0 s")
    assert len(lines) == 4


def test_several_nodes_report_into_a_folder_that_they_share(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = world.single_rank_world()
    own.nodes = 2
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(watchdog, "_SECONDS_TO_APPEAR", 0.0)
    for cache, shared in (("cache", "cache/hpctrain"), ("file", "here")):
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        with Watchdog(own) as dog:
            assert dog.folder is not None
            assert dog.folder.parent == tmp_path / shared
            assert not any((tmp_path / shared).iterdir()), "only a rank that is silent writes there"
    monkeypatch.setattr(Path, "touch", lambda _: None)
    with Watchdog(own) as dog:
        assert dog.folder is None
        assert dog._is_excused()
    assert "the nodes share neither the user's cache folder nor the current folder" in capsys.readouterr().err


def test_a_report_names_the_caller_of_an_audited_call() -> None:
    names: dict[str, Any] = {"__name__": "hpctrain.audit.audited_transport", "where": hang_report._where}
    exec("def wait():\n    return where()", names)  # noqa: S102
    inside, caller = names["wait"]().split(", called at ")
    assert re.fullmatch(r"hpctrain/comm/hangs/hang_report\.py:\d+ in _where", inside)
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in test_a_report_names_the_caller\w+", caller)


@pytest.mark.mpi(min_size=1, max_size=1)
def test_a_call_on_shared_communicators_is_reported_with_all_their_groups(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = world.single_rank_world()
    Mesh(single, {})
    call = RecordedCall("data", "nccl:all_reduce", 3, "[4] of Float", 1.0, is_complete=False)
    monkeypatch.setattr(hang_report, "recorded_calls", lambda: [call])
    incomplete = take_report(single, "token", 1.0).incomplete
    assert incomplete == "nccl:all_reduce 3 of data ([4] of Float), shared with data x context"
