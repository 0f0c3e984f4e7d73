"""Whenever a run is killed, its metrics lose a row at most: the one that was being written.

Tests of watch/metrics.py and report/metric_rows.py.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from hpctrain.report.metric_rows import read_metrics
from hpctrain.watch import metrics as module
from hpctrain.watch.metrics import MetricsWriter
from tests.watch.test_metrics import step

KILLS = 1000
REAL_KILLS = 8

# Writes rows until it is killed, and tells after each that it is written.
PROGRAM = """
import itertools, sys
from pathlib import Path
from hpctrain.report.metric_rows import read_metrics
from hpctrain.watch.metrics import MetricsWriter, StepMetrics
path = Path(sys.argv[1])
done = max((row["step"] for row in read_metrics(path)), default=0) if path.exists() else None
writer = MetricsWriter(path, done)
for number in itertools.count((done or 0) + 1):
    load = {"load": [1.5] * (number % 50)}
    writer.write(StepMetrics(number, 512 * number, {"loss": 2.5}, 0.5, 0.1, 0.2, 9.0, 4, experts=load))
    print(number, flush=True)
"""


def test_a_thousand_kills_at_any_byte_of_the_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that was cut off at some byte; then reading, and going on behind a whole row."""
    monkeypatch.setattr(module.os, "fsync", lambda _: None)  # no machine dies here
    monkeypatch.setattr(module, "flush_to_disk", lambda _: None)
    draw = random.Random(21)
    whole = tmp_path / "whole.jsonl"
    with closing(MetricsWriter(whole)) as writer:
        for number in range(1, 6):
            more = {"experts": {"load": [0.5] * draw.randrange(40)}} if number % 2 else {"spike": "é\n"}
            writer.write(step(number, **more))
    lines = whole.read_bytes().splitlines(keepends=True)
    torn = tmp_path / "metrics.jsonl"
    cuts = set()
    for _ in range(KILLS):
        count = draw.randrange(1, 6)
        cut = draw.randrange(len(lines[count - 1]) + 1)
        cuts.add((count, cut))
        torn.write_bytes(b"".join(lines[: count - 1]) + lines[count - 1][:cut])
        known = [row["step"] for row in read_metrics(torn)]
        full = count if cut == len(lines[count - 1]) else count - 1
        assert known == list(range(1, full + 1)), (count, cut)
        resumed = draw.randrange(full + 1)
        with closing(MetricsWriter(torn, resumed)) as writer:
            for number in range(resumed + 1, resumed + 3):
                writer.write(step(number, loss=1.0))
        rows = read_metrics(torn)
        assert [row["step"] for row in rows] == list(range(1, resumed + 3))
        assert [row["loss"] for row in rows] == [2.5] * resumed + [1.0] * 2
        assert torn.read_bytes().startswith(b"".join(lines[:resumed]))
    assert len(cuts) > KILLS / 2


def test_processes_that_are_killed_while_they_write(tmp_path: Path) -> None:
    path, draw, known = tmp_path / "metrics.jsonl", random.Random(3), 0
    for _ in range(REAL_KILLS):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(draw.randrange(1, 200)):
            known = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        told = process.stdout.read().split()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        known = int(told[-1]) if told and told[-1].isdigit() else known
        steps = [row["step"] for row in read_metrics(path)]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= known - 1
