"""Reading of `metrics.jsonl`, which has a JSON object for each step, one per line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.errors import InputOutputError, failing_as
from hpctrain.files import open_regular, parse_json

METRICS_FILE = "metrics.jsonl"
LINE_BYTES = 1 << 20
"""Largest length of a row. Longer lines count as several lines, which are not rows."""

Row = dict[str, Any]


def read_metrics(path: Path | str) -> list[Row]:
    """Return the rows of a metrics file, without an incomplete last line.

    Raises:
        InputOutputError: The file cannot be read, or a line before the last one is not a row.
    """
    return list(metric_rows(Path(path)))


def metric_rows(path: Path) -> Iterator[Row]:
    """Yield the rows that `read_metrics` returns."""
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
    """Yield the bytes of each line of a metrics file, and its row; None if it is not a row."""
    with failing_as(f"{path}: cannot be read"), open_regular(path) as lines:
        while line := lines.readline(LINE_BYTES):
            yield line, _parse(line)


def _parse(line: bytes) -> Row | None:
    # A line without a line break is incomplete even if it is valid JSON: `12` may be the start of `123`.
    if not line.endswith(b"\n"):
        return None
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
