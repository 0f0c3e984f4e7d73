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


def places(rows: Sequence[Row], axis: XAxis) -> dict[int, float]:
    """Return the places of steps on an axis, by step.

    These are the tokens or the seconds of all steps up to the step. Steps without such a value have no place.
    For seconds, neither have later ones.
    """
    steps: dict[int, float] = {}
    total = 0.0
    for row in rows:
        if axis == "steps":
            steps[row["step"]] = row["step"]
            continue
        value = measured(row.get("tokens" if axis == "tokens" else "seconds"))
        if value is None and axis == "time":
            break
        if value is not None:
            total = value if axis == "tokens" else total + value
            steps[row["step"]] = total
    return steps


def lacking(rows: Sequence[Row], axis: XAxis) -> str:
    """Return the key of an axis that a run's metrics lack; "" if its first row has a place."""
    key = "tokens" if axis == "tokens" else "seconds"
    return "" if axis == "steps" or not rows or rows[0]["step"] in places(rows[:1], axis) else key


def measured(value: object) -> float | None:
    """Return a value if it is a number from 0 on that can be a measurement, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
        return None
    return float(value) if isfinite(value) else None
