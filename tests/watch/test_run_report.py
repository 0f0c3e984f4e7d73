"""What folders of runs tell, and the report that the verb makes of it.

Tests of watch/run_report.py, watch/predicted_vs_measured.py, report/page/run_summary.py and cli/report.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpctrain.cli.report import command as report
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.report.page.page import HEAD
from hpctrain.report.page.run_summary import ValuePair
from hpctrain.watch.run_report import RANK_FILES, read_runs, write_report

LOG = (
    "2026-11-26 10:00:02,100 WARNING step 4: gradient norm 9 is high; update left out (1 spike so far)\n"
    "2026-11-26 10:00:09,100 WARNING step 12: loss 99 is high; back to the state after step 8\n"
    "2026-11-26 10:01:00,100 INFO    goes on from runs/small/checkpoints/step-00000006.h5 at step 6\n"
    "2026-11-26 10:01:01,100 WARNING rank 1 computes twice as long as the median\n"
)
STATUS = {"state": "failed", "reason": "rank 1 hangs", "step": 10, "steps": 20, "ranks": 2, "host": "node-1"}
STATUS |= {"time": "2026-11-26T10:02:00Z", "title": "a title", "started": "2026-11-26T10:00:00Z", "pid": 1}
STAGE = {"parameter_bytes": 100, "gradient_bytes": 50, "other_bytes": 0, "total_bytes": 150}
PLAN = {
    "predicted": {"ranks": 2, "stages": [STAGE, STAGE | {"parameter_bytes": 120}]},
    "measured": [STAGE | {"gradient_bytes": 60}, STAGE],
    "time": {
        "machine": "ours",
        "predicted": {"seconds": 1.5, "seconds_by_cause": {"products": 1.0, "fixed": 0.5}},
        "measured": {"seconds": 2.0},
    },
}
LEDGER = [
    {
        "axis": "data",
        "operation": "all_reduce",
        "phase": "synchronize",
        "calls": 4,
        "bytes": 800,
        "seconds": 1.0,
    },
    {"axis": "data", "operation": "all_gather", "phase": "step", "calls": 4, "bytes": 400, "seconds": 1.0},
    {
        "axis": "world",
        "operation": "all_reduce",
        "phase": "evaluation",
        "calls": 4,
        "bytes": 7,
        "seconds": 1.0,
    },
]
SIDES = ("predicted", "measured")
DECK = '[run]\ntitle = "a title"\n\n[model]\nmodule = "mine.py:Model"\n\n[[evaluation]]\nname = "code"\n'


def rows(steps: int = 10) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = [
        {"step": step, "tokens": 100 * step, "seconds": 0.5, "loss": 3 / step, "grad_norm": 1.0}
        for step in range(1, steps + 1)
    ]
    table[3] |= {"skipped": True, "spike": "gradient norm 9 is high", "loss": None}
    table[8] |= {"went_back": {"step": 12, "why": "loss 99 is high"}}
    return table


def a_run(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    contents = {"metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows()), "log.txt": LOG}
    contents |= {"status.json": json.dumps(STATUS), "plan.json": json.dumps(PLAN), "deck.toml": DECK}
    contents |= {"ledger.json": json.dumps(LEDGER)}
    for name, content in (contents | files).items():
        (folder / name).write_text(content)
    return folder


def invoke(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(report, [str(word) for word in words])
    return (
        (0, done.output)
        if done.exception is None
        else (getattr(done.exception, "exit_code", -1), str(done.exception))
    )


def test_a_folder_tells_all_of_its_run(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "small")
    (folder / "log.1.txt").write_text(
        LOG.splitlines()[0] + "\n2026-11-26 10:00:03,100 ERROR   out of memory\n"
    )
    (folder / "hang.1.txt").write_text(
        "rank 1 of 2 on node-1: no sign of life for 60 s\nit is in recv\nmore\n"
    )
    (folder / "checkpoints").mkdir()
    for step in (4, 8):
        (folder / "checkpoints" / f"step-{step:08d}.h5").write_bytes(b"x" * step)
    (folder / "checkpoints" / "latest").symlink_to("step-00000008.h5")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (run,) = read_runs([folder])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert (run.name, run.title, run.state, run.reason) == ("small", "a title", "failed", "rank 1 hangs")
    assert run.facts["ranks"] == "2"
    assert run.deck["model.module"] == '"mine.py:Model"'
    assert run.deck["evaluation"] == '[{name = "code"}]'
    assert [(event.step, event.kind) for event in run.events] == [
        (None, "hang"),
        (4, "spike"),
        (None, "error"),
        (12, "went back"),
        (6, "resumed"),
        (None, "warning"),
        (10, "failed"),
    ]
    assert run.events[2].words == "rank 1: out of memory"
    assert run.events[0].words == "rank 1 of 2 on node-1: no sign of life for 60 s it is in recv"
    assert [(kept.path.name, kept.size, kept.note) for kept in run.checkpoints] == [
        ("step-00000008.h5", 8, "latest"),
        ("step-00000004.h5", 4, ""),
    ]
    assert len(run.problems) == 2  # neither is a checkpoint at all


def test_predictions_stand_beside_measurements(tmp_path: Path) -> None:
    (run,) = read_runs([a_run(tmp_path / "small")])
    told = {each.heading: each for each in run.comparisons}
    assert list(told) == [
        "Memory of a rank of stage 0",
        "Memory of a rank of stage 1",
        "Step time",
        "Bytes that a rank sends and receives per step, by axis",
    ]
    assert told["Memory of a rank of stage 0"].pairs == [
        ValuePair("parameters", 100, 100),
        ValuePair("gradients", 50, 60),
        ValuePair("total", 150, 150),
    ]
    assert told["Step time"].pairs == [
        ValuePair("matrix products", 1.0, None),
        ValuePair("other", 0.5, None),
        ValuePair("total", 1.5, 2.0),
    ]
    # The last job made 4 of the 10 steps. What a module of the user's sends is not planned: it would be run.
    assert told["Bytes that a rank sends and receives per step, by axis"].pairs == [
        ValuePair("data", None, 300),
        ValuePair("all axes", None, 300),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("status.json", "{"),
        ("status.json", '{"state": 1}'),
        ("plan.json", "[" * 100_000),
        (
            "plan.json",
            '{"predicted": {"stages": [1, {"parameter_bytes": "x"}]}, "measured": 5, "time": 1}',
        ),
        (
            "plan.json",
            json.dumps({"time": {side: {"seconds": 1, "seconds_by_cause": {"odd": 1}} for side in SIDES}}),
        ),
        (
            "ledger.json",
            '[1, {"axis": [], "phase": {}, "bytes": NaN}, {"axis": "x", "phase": "step", "bytes": 1e999}]',
        ),
        ("ledger.json", '{"axis": "data"}'),
        ("deck.toml", "x = ["),
        ("deck.toml", "a = 1\n[run]\ntitle = 5\n"),
        ("faults.jsonl", "\x00\n[]\n{}\n" + '{"step": 1, "ranks": 5, "kind": [], "detail": {}}\n'),
        ("trace.json", "{}"),
        ("trace.json", '{"otherData": {"ranks": [], "schedule": "x", "placement": "y"}, "traceEvents": []}'),
        ("log.txt", "\xff" * 100),
    ],
)
def test_whatever_a_file_holds_the_rest_is_told(tmp_path: Path, name: str, content: str) -> None:
    output = tmp_path / "report.html"
    assert write_report([a_run(tmp_path / "small", **{name: content})], output) > 10_000
    assert output.read_text().startswith(HEAD)


def test_files_that_are_none_are_told_of(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "small")
    for name in ("plan.json", "log.txt", "deck.toml", "status.json", "ledger.json"):
        (folder / name).unlink()
        if name == "ledger.json":
            os.mkfifo(folder / name)
        else:
            (folder / name).mkdir()
    (run,) = read_runs([folder])
    assert len(run.problems) == 5


def test_many_files_of_ranks_are_not_all_read(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "small")
    for rank in range(1, 2 * RANK_FILES):
        (folder / f"log.{rank}.txt").write_text(f"2026-11-26 10:00:03,100 ERROR   rank's own {rank}\n")
    (run,) = read_runs([folder])
    assert sum("rank's own" in event.words for event in run.events) == RANK_FILES


def test_the_verb_writes_a_page_and_replaces_only_such(tmp_path: Path) -> None:
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other")
    output = tmp_path / "report.html"
    code, said = invoke(one, other, "--output", output)
    assert (code, said.split()[0]) == (0, str(output))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]
    assert "2 runs" in output.read_text()
    assert invoke(one, "--output", output)[0] == 0
    assert "2 runs" not in output.read_text()
    (tmp_path / "again").symlink_to(one)
    assert invoke(one, tmp_path / "again", one, "--output", output)[0] == 0
    assert "2 runs" not in output.read_text() and "3 runs" not in output.read_text()
    output.write_text("notes of mine")
    assert invoke(one, "--output", output) == (2, f"{output}: already exists (--force replaces it)")
    assert output.read_text() == "notes of mine"
    assert invoke(one, "--output", output, "--force")[0] == 0


def test_what_cannot_be_reported_is_one_sentence(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one")
    empty = a_run(tmp_path / "empty", **{"metrics.jsonl": ""})
    begun = a_run(tmp_path / "begun")
    (begun / "metrics.jsonl").unlink()
    (begun / ".hpctrain-run").write_text("")
    (tmp_path / "bare").mkdir()
    with pytest.raises(HpctrainError) as caught:
        write_report([one, empty, begun, tmp_path / "bare", tmp_path / "gone"], tmp_path / "report.html")
    assert caught.value.exit_code == 2
    assert [problem.partition(": ")[2].partition(";")[0] for problem in caught.value.problems] == [
        "has no steps yet",
        "has no steps yet",
        "is not a run folder: it has no metrics.jsonl",
        "no such folder",
    ]
    torn = a_run(tmp_path / "torn", **{"metrics.jsonl": '{"step": 1}\nnot a row\n{"step": 2}\n'})
    with pytest.raises(InputOutputError, match="the file is damaged"):
        write_report([torn], tmp_path / "report.html")
    half = a_run(tmp_path / "half", **{"metrics.jsonl": '{"step": 1'})
    assert invoke(half, "--output", tmp_path / "report.html")[0] == 2
    assert invoke(one, "--output", tmp_path / "gone" / "report.html")[0] == 3
    assert invoke(one, "--output", tmp_path)[0] == 2
    with pytest.raises(HpctrainError, match="control character"):
        write_report([one], tmp_path / "a\nb.html")
    assert not (tmp_path / "report.html").exists()
