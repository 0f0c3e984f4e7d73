"""`metrics.csv`: the rows of `metrics.jsonl` as a table, whose columns grow with the figures there are."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hpctrain.files import finite
from hpctrain.report.rows import METRICS_FILE, Row, scan_metrics
from hpctrain.watch.scalars import Scalar, scalars

CSV_FILE = "metrics.csv"


class CsvFile:
    """The file of a run that goes on after `step`; a cell is empty where a step has no such figure.

    A figure that was not there before gets a column behind the others, and the file is written anew from
    `metrics.jsonl`, as it is where the run goes on or back; the old file stands until the new one does.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path, self._metrics = folder / CSV_FILE, folder / METRICS_FILE
        self._columns: dict[str, None] = {}
        self._file: TextIO | None = None
        self.go_back(step)

    def write(self, row: Row, now: float) -> None:  # noqa: ARG002  (a row has no time of day)
        """Append the row of a step."""
        cells = _cells(row)
        if not cells.keys() <= self._columns.keys():
            self._columns |= dict.fromkeys(cells)
            self._anew(row["step"] - 1)
        assert self._file is not None
        self._writer(self._file).writerow(cells)
        self._file.flush()

    def go_back(self, step: int) -> None:
        """Leave the rows of steps up to `step`."""
        for row in self._rows(step):
            self._columns |= dict.fromkeys(_cells(row))
        self._anew(step)

    def close(self, whole: bool) -> None:  # noqa: ARG002  (a table does not tell)
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def abandon(self) -> None:
        """Nothing here keeps a process from ending."""

    def _anew(self, step: int) -> None:
        self.close(whole=False)
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
        """Those of the metrics of steps up to `step`; the run may be appending others."""
        if self._metrics.exists():
            for _, row in scan_metrics(self._metrics):
                if row is not None and row["step"] <= step:
                    yield row

    def _writer(self, file: TextIO) -> csv.DictWriter[str]:
        return csv.DictWriter(file, list(self._columns), extrasaction="ignore", lineterminator="\n")


def _cells(row: Row) -> dict[str, Scalar | None]:
    """The cells of a row by their columns; that of a figure that is not finite is empty."""
    return {name: finite(value) for name, value in scalars(row).items()}
