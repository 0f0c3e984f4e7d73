"""Horizontal axis of a picture of a run: its steps, its tokens, or the time of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Literal

from hpctrain.report.metric_rows import Row

XAxis = Literal["steps", "tokens", "time"]
AXES: tuple[XAxis, ...] = ("steps", "tokens", "time")

_MOST = 1e30
"""Largest value of a row that counts as a measurement."""


def axis_positions(rows: Sequence[Row], axis: XAxis) -> dict[int, float]:
    """Return the position of each step on an axis, by step.

    It is the number of the step, or the tokens or the seconds of all steps up to it. Steps without such a
    value have no position. For seconds, the steps after them have none either.
    """
    positions: dict[int, float] = {}
    total = 0.0
    for row in rows:
        if axis == "steps":
            positions[row["step"]] = row["step"]
            continue
        value = valid_measurement(row.get("tokens" if axis == "tokens" else "seconds"))
        if value is None and axis == "time":
            break
        if value is not None:
            total = value if axis == "tokens" else total + value
            positions[row["step"]] = total
    return positions


def missing_axis_key(rows: Sequence[Row], axis: XAxis) -> str:
    """Return the key of an axis that the first row of a run's metrics lacks; "" if it lacks none."""
    key = "tokens" if axis == "tokens" else "seconds"
    return "" if axis == "steps" or not rows or rows[0]["step"] in axis_positions(rows[:1], axis) else key


def valid_measurement(value: object) -> float | None:
    """Return a value as a float if it is a finite number from 0 to 1e30, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
        return None
    return float(value) if isfinite(value) else None
