"""Marks of what happened to runs, and the axes on which pictures show them.

Tests of report/marks.py, report/axis.py and report/palette.py, and of what report/plots.py makes of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.plot import command as plot
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.report.axis import axis_positions, missing_axis_key
from hpctrain.report.marks import (
    LINE_BYTES,
    LOG_BYTES,
    MOST_FAULTS,
    StepMark,
    marks_of,
    read_faults,
    read_log,
)
from hpctrain.report.palette import DASHES, ON_DARK, ON_LIGHT, line_of
from hpctrain.report.plots import draw, load_runs, plot_runs

LOG = (
    "2026-11-26 10:00:00,100 INFO    small: llama, 131K parameters\n"
    "2026-11-26 10:00:02,100 WARNING step 4: gradient norm 9 is high; update left out (1 spike so far)\n"
    "2026-11-26 10:01:00,100 INFO    goes on from runs/small/checkpoints/step-00000006.h5 at step 6\n"
    "Traceback (most recent call last):\n"
    "2026-11-26 10:01:01,100 ERROR   rank 1: out of memory\n"
)
FAULT = {"time": "2026-11-26T10:00:00Z", "step": 8, "kind": "memory", "name": "block.0", "phase": "forward"}


def rows(steps: int) -> list[dict[str, object]]:
    table: list[dict[str, object]] = [
        {"step": step, "tokens": 100 * step, "seconds": 0.5, "loss": 3 / step, "grad_norm": 1.0, "lr": 1e-3}
        for step in range(1, steps + 1)
    ]
    table[3] |= {"skipped": True, "spike": "gradient norm 9 is high", "loss": None}
    table[5] |= {"skipped": True}
    table[8] |= {"went_back": {"step": 12, "why": "loss 99"}}
    return table


def a_run(folder: Path, table: list[dict[str, object]], log: str = LOG) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (folder / "log.txt").write_text(log)
    (folder / "faults.jsonl").write_text(
        json.dumps(FAULT | {"ranks": [1]}) + '\nnot a row\n{"step": "8"}\n{"step": -1}\n'
    )
    return folder


def test_marks_are_told_from_metrics_log_and_faults(tmp_path: Path) -> None:
    run = a_run(tmp_path / "small", rows(10))
    log, faults = read_log(run / "log.txt"), read_faults(run / "faults.jsonl")
    assert [(line.time[-8:], line.level) for line in log] == [
        ("10:00:02", "WARNING"),
        ("10:01:00", "INFO"),
        ("10:01:01", "ERROR"),
    ]
    assert marks_of(rows(10), log, faults) == [
        StepMark(4, "spike", "gradient norm 9 is high; update skipped"),
        StepMark(6, "resumed", "goes on from runs/small/checkpoints/step-00000006.h5 at step 6"),
        StepMark(6, "skipped", "update skipped: not finite"),
        StepMark(8, "went back", "returned from step 12: loss 99"),
        StepMark(8, "fault", "silent fault in memory block.0 (forward) on rank 1"),
    ]


def test_logs_and_faults_are_bounded(tmp_path: Path) -> None:
    """Of a file that is too long the end is read, and no line of it is taken for two halves."""
    (tmp_path / "log.txt").write_text(LOG + ("x" * (LINE_BYTES - 1) + "\n") * (LOG_BYTES // LINE_BYTES) + LOG)
    assert len(read_log(tmp_path / "log.txt")) == 3
    assert len(read_log(tmp_path / "log.txt", 2)) == 2
    (tmp_path / "faults.jsonl").write_text((json.dumps(FAULT) + "\n") * (MOST_FAULTS + 5) + "[" * 40_000)
    assert len(read_faults(tmp_path / "faults.jsonl")) == MOST_FAULTS
    assert (read_log(tmp_path / "none"), read_faults(tmp_path / "none")) == ([], [])
    (tmp_path / "folder").mkdir()
    for read in (read_log, read_faults):
        with pytest.raises(InputOutputError, match="cannot be read"):
            read(tmp_path / "folder")


def test_positions_on_each_axis() -> None:
    table = rows(10)
    assert axis_positions(table, "steps") == {step: step for step in range(1, 11)}
    assert axis_positions(table, "tokens") == {step: 100 * step for step in range(1, 11)}
    assert axis_positions(table, "time") == {step: step / 2 for step in range(1, 11)}
    # Steps after one of unknown length have no position in time. A step without tokens alone is left out.
    table[4] |= {"seconds": None, "tokens": -1}
    assert list(axis_positions(table, "time")) == [1, 2, 3, 4]
    assert list(axis_positions(table, "tokens")) == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert missing_axis_key(table, "time") == missing_axis_key([], "time") == ""
    assert missing_axis_key([{"step": 1}], "time") == "seconds"
    assert missing_axis_key([{"step": 1, "tokens": True}], "tokens") == "tokens"
    assert missing_axis_key([{"step": 1}], "steps") == ""


@pytest.mark.parametrize(
    ("axis", "label", "scale"),
    [("steps", "step", 1), ("tokens", "tokens", 100), ("time", "training time", 0.5)],
)
def test_pictures_have_marks_on_each_axis(tmp_path: Path, axis: str, label: str, scale: float) -> None:
    (run,) = load_runs([a_run(tmp_path / "small", rows(10))], axis)  # type: ignore[arg-type]
    (axes,) = draw([run])["grad_norm"].axes
    assert axes.get_xlabel().startswith(label)
    drawn = {str(line.get_label()): list(line.get_xdata()) for line in axes.lines}
    assert drawn.pop("gradient norm") == [scale * step for step in range(1, 11)]
    assert drawn == {
        "skipped steps (2)": [4 * scale, 6 * scale],
        "resumed (1)": [6 * scale],
        "went back (1)": [8 * scale],
        "fault (1)": [8 * scale],
    }


def test_verb_draws_over_an_axis(tmp_path: Path) -> None:
    run = a_run(tmp_path / "small", rows(10))
    result = CliRunner().invoke(plot, [str(run), "--x", "time", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "out").iterdir())) == 4
    both = CliRunner().invoke(plot, [str(run), "--x", "time", "--against", "time"])
    assert (both.exit_code, "--x conflicts with --against" in both.output) == (2, True)
    bare = a_run(tmp_path / "bare", [{"step": 1, "loss": 2.0}] * 10)
    with pytest.raises(HpctrainError, match=r"its first row has no seconds; use --x steps$") as caught:
        plot_runs([bare], axis="time")
    assert caught.value.exit_code == 2


def test_runs_keep_apart_when_colours_are_used_up() -> None:
    assert len(ON_LIGHT) == len(ON_DARK) == len(set(ON_LIGHT)) == len(set(ON_DARK))
    lines = [line_of(index) for index in range(len(ON_LIGHT) * len(DASHES))]
    assert len(set(map(str, lines))) == len(lines)
    assert line_of(len(lines)) == lines[0]
