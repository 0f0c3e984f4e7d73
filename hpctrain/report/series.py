"""Metrics of a run as arrays with a value for each step."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import HpctrainError, require_exists
from hpctrain.files import path_of
from hpctrain.report.metric_rows import METRICS_FILE, Row, metric_rows

COLUMNS = 1000
DEPTH = 8
"""Largest depth of nested records. Deeper ones are left out."""

CELLS = 1 << 28
"""Largest number of values, which are 2 GiB."""

_EXACT = 1 << 53
"""Largest integer up to which all integers are exact as floats."""


def metrics(run: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Return the metrics of a run folder, or of a `metrics.jsonl`, by name, with a value for each step.

        columns = hpctrain.metrics("runs/quickstart")
        plt.plot(columns["step"], columns["loss"])

    `step`, `tokens` and other whole numbers that every step has are int64, true and false are bool (False if
    a step has no value), other numbers float64 (NaN if a step has no finite value), texts are objects ("" if
    there is none). A list, such as that of all mixtures of experts, is a row of a matrix [steps, values].
    Values of nested records have names such as "experts.balance". Steps are ascending: if a run has gone
    back, its last values count. The run may be active: an incomplete line is left out.

    Args:
        run: The run folder or file.

    Raises:
        HpctrainError: The folder has no metrics, or they are too large.
        InputOutputError: The file is damaged.
    """
    path = path_of(run, "run", "a run's folder")
    if path.is_dir():
        path /= METRICS_FILE
        if not path.exists():
            raise HpctrainError(f"{run}: is not a run folder, since it has no {METRICS_FILE}")
    else:
        require_exists(path, f"run folder or {METRICS_FILE}")
    table = _SeriesTable(path)
    for row in metric_rows(path):
        table.add(row)
    return table.arrays()


class _Column:
    """Column of values. Numbers are in an array, other values in a dict by row."""

    def __init__(self, rows: int) -> None:
        self.numbers = array("d", [nan]) * rows
        self.objects: dict[int, str | list[Any]] = {}
        self.numeric = self.integers = self.bools = 0
        """Numbers of rows with a number, with an exact integer, and with a bool."""
        self.width = 0
        """Length of the longest list."""

    def add(self, value: object) -> None:
        """Add the value of the next row."""
        number = nan
        if isinstance(value, bool):
            self.bools += 1
            number = float(value)
        elif isinstance(value, int | float):
            self.numeric += 1
            self.integers += isinstance(value, int) and abs(value) <= _EXACT
            number = _float(value)
        elif isinstance(value, str | list):
            self.objects[len(self.numbers)] = value
            if isinstance(value, list):
                self.width = max(self.width, len(value))
        self.numbers.append(number)

    def cut(self, rows: int) -> None:
        """Remove all rows from `rows` on. Counts of values are not reduced."""
        del self.numbers[rows:]
        self.objects = {row: value for row, value in self.objects.items() if row < rows}

    def array(self) -> NDArray[Any]:
        """Return the values as described in `metrics`."""
        numbers: NDArray[np.float64] = np.array(self.numbers)
        count = len(numbers)
        lists = {row: value for row, value in self.objects.items() if isinstance(value, list)}
        only_lists = len(lists) == len(self.objects) and not self.numeric and not self.bools
        if lists and only_lists and all(_is_number(each) for value in lists.values() for each in value):
            matrix = np.full((count, self.width), nan)
            for row, value in lists.items():
                matrix[row, : len(value)] = [_float(each) for each in value]
            return matrix
        if self.objects:
            texts = np.full(count, "", object)
            for row, text in self.objects.items():
                texts[row] = text
            return texts
        if self.bools and not self.numeric:
            return np.nan_to_num(numbers).astype(bool)
        if self.integers and self.integers == self.numeric and np.isfinite(numbers).all():
            return numbers.astype(np.int64)
        return numbers


class _SeriesTable:
    """Table of rows with ascending steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = array("q")
        self.columns: dict[str, _Column] = {}

    def add(self, row: Row) -> None:
        """Add a row. Earlier rows of the same or later steps are removed."""
        step = row["step"]
        if self.steps and step <= self.steps[-1]:
            rows = bisect_left(self.steps, step)
            del self.steps[rows:]
            for column in self.columns.values():
                column.cut(rows)
        here = dict(_flat("", row, DEPTH))
        for name in here:
            if name not in self.columns:
                if len(self.columns) == COLUMNS:
                    raise HpctrainError(
                        f"{self.path}: has more than {COLUMNS} metrics, so no run can have written it"
                    )
                self.columns[name] = _Column(len(self.steps))
        for name, column in self.columns.items():
            column.add(here.get(name))
        self.steps.append(step)
        width = sum(max(1, column.width) for column in self.columns.values())
        if width * len(self.steps) > CELLS:
            raise HpctrainError(
                f"{self.path}: has more than {CELLS} values in {len(self.steps)} steps, so no run can have "
                "written it"
            )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all columns; only "step" without rows."""
        arrays = {name: column.array() for name, column in self.columns.items()}
        return {**arrays, "step": np.array(self.steps, np.int64)}


def _flat(prefix: str, row: Row, depth: int) -> Iterator[tuple[str, object]]:
    """Yield names and values. Those of nested records have names such as "experts.balance"."""
    for name, value in row.items():
        if not isinstance(value, dict):
            yield f"{prefix}{name}", value
        elif depth:
            yield from _flat(f"{prefix}{name}.", value, depth - 1)


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _float(value: float | None) -> float:
    try:
        return nan if value is None else float(value)
    except OverflowError:
        return nan
