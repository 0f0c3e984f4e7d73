"""What a run measured, as arrays: the columns of its metrics, one value a step."""

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
from hpctrain.report.rows import METRICS_FILE, Row, metric_rows

COLUMNS = 1000
DEPTH = 8  # of records within records; what is deeper is left out
CELLS = 1 << 28  # 2 GiB of numbers
_EXACT = 1 << 53  # whole numbers up to here are the same as floats


def metrics(run: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """The metrics of a run's folder, or of a `metrics.jsonl`, by name: one value of each for every step.

        columns = hpctrain.metrics("runs/quickstart")
        plt.plot(columns["step"], columns["loss"])

    `step`, `tokens` and other whole numbers that every step has are int64, true and false are bool (false
    where a step says nothing), other numbers float64 (nan where a step has none, or it was not finite), texts
    are objects ("" where there is none). A list, as of all mixtures of experts, is a row of a matrix [steps,
    values]. What is within another record is named "experts.balance". Steps rise: where a run has gone back,
    what it did last counts. A run may be under way: a line that is not yet complete is left out.
    HpctrainError for a folder without metrics or no room, InputOutputError for a damaged file.
    """
    path = path_of(run, "run", "a run's folder")
    if path.is_dir():
        path /= METRICS_FILE
        if not path.exists():
            raise HpctrainError(f"{run}: not a run directory: it holds no {METRICS_FILE}")
    else:
        require_exists(path, f"run folder or {METRICS_FILE}")
    table = _SeriesTable(path)
    for row in metric_rows(path):
        table.add(row)
    return table.arrays()


class _Column:
    """A value a row: numbers as they are, and what else there is by its row."""

    def __init__(self, rows: int) -> None:
        self.numbers = array("d", [nan]) * rows
        self.others: dict[int, str | list[Any]] = {}
        self.numeric = self.whole = self.bools = 0  # rows with a number, with a whole one, with true or false
        self.width = 0  # of the longest list

    def add(self, value: object) -> None:
        """The value of the next row."""
        number = nan
        if isinstance(value, bool):
            self.bools += 1
            number = float(value)
        elif isinstance(value, int | float):
            self.numeric += 1
            self.whole += isinstance(value, int) and abs(value) <= _EXACT
            number = _float(value)
        elif isinstance(value, str | list):
            self.others[len(self.numbers)] = value
            if isinstance(value, list):
                self.width = max(self.width, len(value))
        self.numbers.append(number)

    def cut(self, rows: int) -> None:
        """Leave only so many rows; what was counted of the others stays so."""
        del self.numbers[rows:]
        self.others = {row: value for row, value in self.others.items() if row < rows}

    def array(self) -> NDArray[Any]:
        """The values, as `metrics` tells."""
        numbers: NDArray[np.float64] = np.array(self.numbers)
        count = len(numbers)
        lists = {row: value for row, value in self.others.items() if isinstance(value, list)}
        alike = len(lists) == len(self.others) and not self.numeric and not self.bools
        if lists and alike and all(_is_number(each) for value in lists.values() for each in value):
            matrix = np.full((count, self.width), nan)
            for row, value in lists.items():
                matrix[row, : len(value)] = [_float(each) for each in value]
            return matrix
        if self.others:
            texts = np.full(count, "", object)
            for row, text in self.others.items():
                texts[row] = text
            return texts
        if self.bools and not self.numeric:
            return np.nan_to_num(numbers).astype(bool)
        if self.whole and self.whole == self.numeric and np.isfinite(numbers).all():
            return numbers.astype(np.int64)
        return numbers


class _SeriesTable:
    """The rows so far, steps rising."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = array("q")
        self.columns: dict[str, _Column] = {}

    def add(self, row: Row) -> None:
        """Another row; those of its step and later ones, which were before it, go."""
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
                    raise HpctrainError(f"{self.path}: has more than {COLUMNS} names, so it is none of a run")
                self.columns[name] = _Column(len(self.steps))
        for name, column in self.columns.items():
            column.add(here.get(name))
        self.steps.append(step)
        width = sum(max(1, column.width) for column in self.columns.values())
        if width * len(self.steps) > CELLS:
            raise HpctrainError(
                f"{self.path}: more than {CELLS} values in {len(self.steps)} steps; it is none of a run"
            )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All columns; "step", where there is no row yet."""
        arrays = {name: column.array() for name, column in self.columns.items()}
        return {**arrays, "step": np.array(self.steps, np.int64)}


def _flat(prefix: str, row: Row, depth: int) -> Iterator[tuple[str, object]]:
    """Names and values, those within another record by its name and theirs."""
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
