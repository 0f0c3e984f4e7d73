"""Reading `metrics.jsonl`: one JSON object a line, one line a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.errors import InputOutputError, failing_as
from hpctrain.files import open_regular, parse_json

METRICS_FILE = "metrics.jsonl"
LINE_BYTES = 1 << 20  # of a row at most; what is longer counts as several lines, which are no rows

Row = dict[str, Any]


def read_metrics(path: Path | str) -> list[Row]:
    """The rows of a metrics file, in the order of the file; a torn last line is left out.

    Raises InputOutputError where the file cannot be read or a line before the last is not a row.
    """
    return list(metric_rows(Path(path)))


def metric_rows(path: Path) -> Iterator[Row]:
    """As `read_metrics`, one row at a time."""
    unreadable: int | None = None
    for number, (_, row) in enumerate(scan_metrics(path), start=1):
        if unreadable is not None:
            raise InputOutputError(
                f"{path}:{unreadable}: not a JSON object with a whole number as its step; "
                "the file is damaged, and removing that line makes the rest readable"
            )
        if row is None:
            unreadable = number
        else:
            yield row


def scan_metrics(path: Path) -> Iterator[tuple[bytes, Row | None]]:
    """Every line of a metrics file as (its bytes, its row), the row None where the line is not a row."""
    with failing_as(f"{path}: cannot be read"), open_regular(path) as lines:
        while line := lines.readline(LINE_BYTES):
            yield line, _parse(line)


def _parse(line: bytes) -> Row | None:
    # A line without its end is torn even if it parses: `12` may have been `123`.
    if not line.endswith(b"\n"):
        return None
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
