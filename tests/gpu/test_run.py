"""Tests of the program of `make gpu-test`, on a CPU: some of its rows, and rows that hang and fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.rows import FUNCTIONS, ROWS
from tests.gpu.run import Row, main, run_rows


def test_every_row_has_a_function() -> None:
    assert [row.name for row in ROWS] == list(FUNCTIONS)


def test_cheap_rows_pass(tmp_path: Path) -> None:
    command = sys.executable, "tests/gpu/run.py", "--device", "cpu", "--output", str(tmp_path / "out")
    rows = "collectives", "grouped-products", "synchronizations"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([*command, "--only", *rows], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    states = {row["name"]: row["state"] for row in results["rows"]}
    assert states == {"versions": "ok"} | dict(zip(rows, ("ok", "ok", "not run"), strict=True))
    assert "| synchronizations | not run | 0 | 40 | needs a GPU |" in done.stdout


def test_a_row_that_hangs_is_ended_with_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the children is in a session of its own, as the ranks of a launcher, and ignores SIGTERM."""
    child = 'trap "" TERM; echo $$ >pid; echo computing; while :; do sleep 1; done'
    rows = (
        Row("hangs", 1.5, command=("bash", "-c", f"setsid bash -c '{child}'; true")),
        Row("fails", 20, command=("bash", "-c", "echo 'loss | 3'; exit 3")),
        Row("cannot", 20, needs=("fails",), command=("echo", "fine")),
        Row("passes", 20, command=("echo", "fine")),
    )
    assert main(rows, ["--device", "cpu", "--output", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["state"] for row in results["rows"]] == ["hung", "failed", "failed", "ok"]
    assert results["rows"][0]["result"] == "ended after 1.5 s; computing"
    assert results["rows"][2]["result"] == "needs fails, which failed"
    assert "| fails | failed | 0 | 20 | exit code 3; loss \\| 3 |" in capsys.readouterr().out
    status = Path("/proc", (tmp_path / "pid").read_text().strip(), "status")
    assert not status.exists() or "State:\tZ" in status.read_text()
    assert main(rows, ["--device", "cpu", "--output", str(tmp_path), "--only", "passes"]) == 0


def test_rows_that_come_too_late_fail(tmp_path: Path) -> None:
    rows = Row("slow", 20, command=("sleep", "20")), Row("late", 20, command=("true",))
    slow, late = run_rows(rows, "cpu", tmp_path, total=0.5)
    assert (slow.state, late.state) == ("hung", "failed")
    assert late.result == "the 0.5 s of all rows are over"
