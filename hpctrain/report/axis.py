"""What a picture of a run is drawn over: its steps, the tokens that it has seen, or the time of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Literal

from hpctrain.report.rows import Row

XAxis = Literal["steps", "tokens", "time"]
AXES: tuple[XAxis, ...] = ("steps", "tokens", "time")

_MOST = 1e30  # of a row: more is no measurement


def places(rows: Sequence[Row], axis: XAxis) -> dict[int, float]:
    """Where on the axis every step lies, by step: with tokens those seen by its end, with time the seconds
    that it and all steps before it took. Steps of which that is not known, and for time all behind them, have
    no place.
    """
    found: dict[int, float] = {}
    total = 0.0
    for row in rows:
        if axis == "steps":
            found[row["step"]] = row["step"]
            continue
        value = measured(row.get("tokens" if axis == "tokens" else "seconds"))
        if value is None and axis == "time":
            break
        if value is not None:
            total = value if axis == "tokens" else total + value
            found[row["step"]] = total
    return found


def lacking(rows: Sequence[Row], axis: XAxis) -> str:
    """The key that a run's metrics lack for an axis; "" where its first row has a place."""
    key = "tokens" if axis == "tokens" else "seconds"
    return "" if axis == "steps" or not rows or rows[0]["step"] in places(rows[:1], axis) else key


def measured(value: object) -> float | None:
    """A number of at least 0 that could be measured; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
        return None
    return float(value) if isfinite(value) else None
