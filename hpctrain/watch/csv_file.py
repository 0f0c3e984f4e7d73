"""`metrics.csv`: the rows of `metrics.jsonl` as a table that gets a column for each new metric."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hpctrain.files import finite
from hpctrain.report.metric_rows import METRICS_FILE, Row, scan_metrics
from hpctrain.watch.scalars import Scalar, scalars

CSV_FILE = "metrics.csv"


class CsvFile:
    """Table of a run's metrics. A cell is empty if a step has no such metric.

    The first value of a metric adds a column after the others. Then the file is written again from
    `metrics.jsonl`, as it is when a run is resumed or goes back. The old file is replaced when the new one is
    complete.

    Args:
        folder: The run folder.
        step: Step after which the run continues.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path, self._metrics = folder / CSV_FILE, folder / METRICS_FILE
        self._columns: dict[str, None] = {}
        self._file: TextIO | None = None
        self.roll_back(step)

    def write(self, row: Row, now: float) -> None:  # noqa: ARG002  (a row has no time of day)
        """Append the row of a step."""
        cells = _cells(row)
        if not cells.keys() <= self._columns.keys():
            self._columns |= dict.fromkeys(cells)
            self._rewrite(row["step"] - 1)
        assert self._file is not None
        self._writer(self._file).writerow(cells)
        self._file.flush()

    def roll_back(self, step: int) -> None:
        """Remove the rows of steps after `step`."""
        for row in self._rows(step):
            self._columns |= dict.fromkeys(_cells(row))
        self._rewrite(step)

    def close(self, completed: bool) -> None:  # noqa: ARG002  (a table does not tell)
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def abandon(self) -> None:
        """Do nothing: a file does not keep a process from ending."""

    def _rewrite(self, step: int) -> None:
        self.close(completed=False)
        new = self._path.with_name(CSV_FILE + ".new")
        with new.open("w", encoding="utf-8", newline="") as file:
            writer = self._writer(file)
            if self._columns:
                writer.writeheader()
            for row in self._rows(step):
                writer.writerow(_cells(row))
        new.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def _rows(self, step: int) -> Iterator[Row]:
        """Yield the rows of `metrics.jsonl` up to a step. The run may append other rows at the same time."""
        if self._metrics.exists():
            for _, row in scan_metrics(self._metrics):
                if row is not None and row["step"] <= step:
                    yield row

    def _writer(self, file: TextIO) -> csv.DictWriter[str]:
        return csv.DictWriter(file, list(self._columns), extrasaction="ignore", lineterminator="\n")


def _cells(row: Row) -> dict[str, Scalar | None]:
    """Return the cells of a row by column. The cell of a metric that is not finite is empty."""
    return {name: finite(value) for name, value in scalars(row).items()}
