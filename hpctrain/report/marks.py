"""Events of a run by step: it was resumed, skipped a step, went back, or met a silent fault.

They are read from metrics, log and the file of silent faults, with limits, since other programs may have
written these files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpctrain.errors import failing_as
from hpctrain.files import open_regular, parse_json
from hpctrain.report.metric_rows import Row

LOG_FILE = "log.txt"
FAULTS_FILE = "faults.jsonl"
"""File of the silent faults that a run has found."""

MarkKind = Literal["resumed", "skipped", "spike", "went back", "fault"]
KINDS: tuple[MarkKind, ...] = ("resumed", "went back", "spike", "skipped", "fault")

LOG_BYTES = 16 << 20
"""Bytes at the end of a log that are read."""

LINE_BYTES = 1 << 16
"""Largest length of a line. Longer ones count as several."""

MOST_LINES = 5000
"""Largest number of lines of a log, the newest ones."""
MOST_FAULTS = 2000

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+) +(.*)", re.DOTALL)
# Logs of earlier versions have "goes on" in place of "resumes".
_RESUMES = re.compile(r"(?:resumes|goes on) from (.*) at step (\d{1,15})")
_REPORTED = re.compile(rb" (WARNING|ERROR|CRITICAL) |(resumes|goes on) from .* at step \d")
"""Pattern of the lines of a log that a report shows."""
_MOST_STEPS = 1 << 53


@dataclass(frozen=True)
class StepMark:
    """Event at a step.

    Attributes:
        step: The step. For "resumed", it is the last step before the run was resumed.
        kind: Kind of the event.
        words: Description.
    """

    step: int
    kind: MarkKind
    words: str


@dataclass(frozen=True)
class LogLine:
    """Line of a log.

    Attributes:
        time: When it was written, in the time of the node.
        level: Level of logging.
        text: The message.
    """

    time: str
    level: str
    text: str

    @property
    def resumed_at(self) -> int | None:
        """Step from which the run was resumed according to this line; None for other lines."""
        found = _RESUMES.fullmatch(self.text)
        return int(found[2]) if found else None


def marks_of(rows: Sequence[Row], log: Sequence[LogLine], faults: Sequence[Row]) -> list[StepMark]:
    """Return all events of a run in the order of their steps."""
    marks = [
        StepMark(step, "resumed", line.text)
        for line in log
        if (step := line.resumed_at) is not None and step > 0
    ]
    for row in rows:
        step, spike, back = row["step"], row.get("spike"), row.get("went_back")
        if isinstance(back, dict):
            marks.append(StepMark(step - 1, "went back", _went_back(back)))
        if isinstance(spike, str):
            marks.append(StepMark(step, "spike", f"{spike}; update skipped"))
        elif row.get("skipped") is True:
            marks.append(StepMark(step, "skipped", "update skipped: not finite"))
    marks += [StepMark(fault["step"], "fault", fault_text(fault)) for fault in faults]
    return sorted(dict.fromkeys(marks), key=lambda mark: mark.step)


def fault_text(row: Row) -> str:
    """Return the description of a row of the file of silent faults."""
    ranks = row.get("ranks")
    where = f" on rank {', '.join(map(str, ranks))}" if isinstance(ranks, list) and ranks else ""
    detail = f": {row['detail']}" if row.get("detail") else ""
    return f"silent fault in {row.get('kind')} {row.get('name')} ({row.get('phase')}){where}{detail}"


def read_log(path: Path, most: int = MOST_LINES) -> list[LogLine]:
    """Return the newest lines of a log that are warnings or errors, or say that the run was resumed.

    Raises:
        InputOutputError: The log exists, but cannot be read.
    """
    with failing_as(f"{path}: cannot be read"):
        if not os.path.lexists(path):
            return []
        lines = [line for raw in _ends(path) if _REPORTED.search(raw) and (line := _line(raw)) is not None]
    return lines[-most:]


def read_faults(path: Path) -> list[dict[str, Any]]:
    """Return the newest silent faults that a run has found; [] without the file. Invalid rows are left out.

    Raises:
        InputOutputError: The file exists, but cannot be read.
    """
    rows: list[dict[str, Any]] = []
    with failing_as(f"{path}: cannot be read"):
        if not os.path.lexists(path):
            return []
        for raw in _ends(path):
            with suppress(ValueError):
                row = parse_json(raw)
                if isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < _MOST_STEPS:
                    rows.append(row)
    return rows[-MOST_FAULTS:]


def _ends(path: Path) -> Iterator[bytes]:
    """Yield the lines at the end of a file, without an incomplete first one."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > LOG_BYTES:
            stream.seek(size - LOG_BYTES)
            stream.readline(LINE_BYTES)
        while line := stream.readline(LINE_BYTES):
            yield line


def _line(raw: bytes) -> LogLine | None:
    found = _LINE.fullmatch(raw.decode("utf-8", errors="replace").rstrip("\n"))
    return LogLine(found[1], found[2], found[3]) if found else None


def _went_back(spike: Row) -> str:
    """Return why a run went back to the state before this step."""
    return f"returned from step {spike.get('step')}: {spike.get('why')}"
