"""Runs that are found below a folder, and the live table of them, in windows of any width and on a terminal.

Tests of watch/run_search.py, watch/run_view.py, watch/live.py and report/sparkline.py.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.status import command
from hpctrain.errors import HpctrainError
from hpctrain.report.sparkline import BLOCKS, LETTERS, sparkline
from hpctrain.watch import run_search as module
from hpctrain.watch import run_view as view_module
from hpctrain.watch.live import WatchedRuns, ended_by_signals, table_lines
from hpctrain.watch.run_files import MARKER
from hpctrain.watch.run_search import find_runs, runs_below
from hpctrain.watch.run_view import RunViewer
from tests.watch.test_status import ago, write


def run(folder: Path, **fields: object) -> Path:
    """A run of the past, whose job is on another node, which says so for long."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    return write(folder, **{"state": "running", "host": "elsewhere"} | fields)  # type: ignore[arg-type]


def losses(folder: Path, values: list[float | None]) -> None:
    rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 99, "lo')


def test_runs_are_found_by_their_files(tmp_path: Path) -> None:
    old = run(tmp_path / "runs" / "old")
    deep = run(tmp_path / "a" / "b" / "c" / "deep")
    run(tmp_path / "a" / "b" / "c" / "d" / "too deep")
    run(old / "inside")
    run(tmp_path / ".hidden" / "run")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "status.json").touch()  # a file of that name makes no run
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "runs")
    (tmp_path / "linked").symlink_to(old)
    os.utime(deep / "status.json", (1, 1))
    os.utime(old / "status.json", (2, 2))
    found = find_runs(tmp_path)
    # A folder is found once, by whichever name; the one that wrote last stands first.
    assert [each.resolve() for each in found.folders] == [old, deep]
    assert found.is_complete
    assert find_runs(old).folders == (old,)


def test_looking_for_runs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    for number in range(5):
        run(tmp_path / f"run-{number}")
    monkeypatch.setattr(module, "MOST_RUNS", 3)
    found = find_runs(tmp_path)
    assert len(found.folders) == 3
    assert not found.is_complete
    assert len(runs_below(tmp_path)) == 3
    assert "only the first 3 runs" in capsys.readouterr().err  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "MOST_RUNS", 5)
    assert find_runs(tmp_path).is_complete
    monkeypatch.setattr(module, "MOST_ENTRIES", 3)
    assert not find_runs(tmp_path).is_complete
    (tmp_path / "empty").mkdir()
    with pytest.raises(HpctrainError, match="no run in this folder or up to 4 levels below it"):
        runs_below(tmp_path / "empty")


def test_without_a_name_all_below_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "runs" / "one")
    run(tmp_path / "runs" / "two", state="done")
    monkeypatch.chdir(tmp_path)
    text = CliRunner().invoke(command, [], standalone_mode=False).output
    assert {line.split()[0] for line in text.splitlines()[:3]} == {"run", "runs/one", "runs/two"}
    listed = json.loads(CliRunner().invoke(command, ["--json"], standalone_mode=False).output)
    assert sorted(each["folder"] for each in listed) == ["runs/one", "runs/two"]
    # Where there is no terminal, a live table is told once.
    assert CliRunner().invoke(command, ["--watch"], standalone_mode=False).output == text
    refused = CliRunner().invoke(command, ["--watch", "--json"])
    assert (refused.exit_code, "--watch, --faulty and --json conflict" in refused.output) == (2, True)


def test_curves() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([1.0], 8) == "▁"
    assert sparkline([2.0, 2.0, 2.0], 8) == "▁▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == BLOCKS
    assert sparkline([7, 6, 5, 4, 3, 2, 1, 0], 8, LETTERS) == LETTERS[::-1]
    assert sparkline([0.0, 0.0, 6.0, 8.0, 0.0, 0.0], 3) == "▁█▁"
    assert len(sparkline([float(each) for each in range(1000)], 16)) == 16


def test_what_is_looked_at_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, now = run(tmp_path / "one"), [0.0]
    losses(folder, [3.0, None, 2.0])
    viewer = RunViewer(folder, clock=lambda: now[0])
    look = viewer.with_details(viewer.status())
    assert (look.status["state"], look.losses, look.problem) == ("running", [3.0, 2.0], "")
    assert look.disk is not None
    assert look.disk.free > 0
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-00000001.h5").write_bytes(b"x" * 100_000)
    losses(folder, [3.0, None, 2.0, 1.0])
    again = viewer.with_details(viewer.status())
    assert (again.losses, again.disk) == ([3.0, 2.0, 1.0], look.disk)  # files are not counted at each look
    now[0] = view_module.SECONDS_PER_COUNT
    later = viewer.with_details(viewer.status()).disk
    assert later is not None
    assert later.used >= look.disk.used + 100_000
    # Of a long file the end alone is read, from the first whole row there.
    monkeypatch.setattr(view_module, "TAIL_BYTES", 100)
    losses(folder, [float(step) for step in range(1000)])
    assert viewer.with_details(viewer.status()).losses == [998.0, 999.0]


def test_a_status_that_cannot_be_read_is_a_line(tmp_path: Path) -> None:
    folder = run(tmp_path / "one")
    (folder / "status.json").write_text("{")
    watched = WatchedRuns([folder])
    texts = [line.plain for line in watched.lines(200, 20)]
    assert "unreadable" in texts[2]
    assert "is not the status of a run" in texts[-1]
    (folder / "status.json").write_text(
        json.dumps(
            {"state": "\x1b[2J", "time": ago(1), "loss": [], "step": {}, "stragglers": 3, "steps": "\n"}
        )
    )
    drawn = "".join(line.plain for line in watched.lines(200, 20))
    assert "\\u001B[2J" in drawn
    assert "\x1b" not in drawn
    assert "\n" not in drawn


def test_any_window_is_wide_enough(tmp_path: Path) -> None:
    slow = [{"rank": 5, "words": "rank 5 is slow"}]
    folder = run(tmp_path / "a-run-with-a-long-name", silent_faults=3, stragglers=slow)
    losses(folder, [3.0, 2.5, 2.0])
    run(tmp_path / "other", state="done", step=100)
    watched = WatchedRuns([folder, tmp_path / "other"])
    wide = [line.plain for line in watched.lines(250, 20)]
    heads = " ".join(wide[1].split())
    assert heads == "run state step loss curve tokens/s left last step slow faults disk"
    for word in ("running", "30/100", "2.5000", "█▅▁", "1.23K", "1 min 10 s", "rank 5", "3"):
        assert word in wide[2]
    assert "done" in wide[3]
    assert wide[4].startswith("free on the disk: ")
    for width in range(1, 250):
        lines = [line.plain for line in watched.lines(width, 20)]
        assert max(map(len, lines)) <= width
        if width >= 40:
            assert "ng-name" in lines[2]
            assert "running" in lines[2]
            assert "30/100" in lines[2]
    assert "un-with-a-long-name" in watched.lines(75, 20)[2].plain
    assert "faults" in watched.lines(75, 20)[1].plain.split()
    assert "disk" not in watched.lines(75, 20)[1].plain.split()


def test_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    for number in range(9):
        run(tmp_path / f"run-{number}", state="done")
    run(tmp_path / "busy")
    watched = WatchedRuns((), tmp_path)
    texts = [line.plain for line in watched.lines(120, 8)]
    assert texts[0].startswith("10 runs, 1 running")
    assert "busy" in texts[2]  # what has a job stands first
    assert "7 more do not fit into the window" in texts
    assert len(texts) <= 8
    assert table_lines([], 80) == []


def test_runs_that_begin_later_are_found(tmp_path: Path) -> None:
    watched = WatchedRuns((), tmp_path)
    assert watched.lines(200, 20)[0].plain.startswith(f"no runs below {tmp_path} yet")
    run(tmp_path / "new")
    for _ in range(10):
        texts = [line.plain for line in watched.lines(200, 20)]
    assert "new" in texts[2]


def test_a_signal_may_come_at_any_instruction() -> None:
    def heed(*_: object) -> None:
        raise TimeoutError

    former = signal.signal(signal.SIGALRM, heed)
    try:
        for moment in range(20):
            events = 0

            def trace(*_: object, moment: int = moment) -> object:
                nonlocal events
                events += 1
                if events > moment:
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGINT)
                return trace

            signal.alarm(20)  # where the handler waits for what it has interrupted
            with ended_by_signals() as ended:
                sys.settrace(trace)  # type: ignore[arg-type]
                ended.wait(0.01)
                sys.settrace(None)
                assert ended.is_set == (events > moment)
    finally:
        sys.settrace(None)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_on_a_terminal_until_somebody_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    losses(run(tmp_path / "runs" / "one"), [3.0, 2.0])
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "20", "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hpctrain", "status", "--watch"],
        cwd=tmp_path,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    shown, deadline, asked = b"", time.monotonic() + 120, False
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 1)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        if not asked and b"runs/one" in shown:
            asked = True
            process.send_signal(number)
    os.close(ours)
    assert process.wait(60) == 0
    text = shown.decode()
    assert "\x1b[?1049h" in text
    # The screen and the cursor are as they were, and the last table stands on it.
    before, _, after = text.rpartition("\x1b[?1049l")
    assert "\x1b[?25l" in before
    assert "\x1b[?25h" in text[text.rindex("\x1b[?25l") :]
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", after)
    assert "runs/one" in last
    assert "running" in last
    assert "Traceback" not in text
