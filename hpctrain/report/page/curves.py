"""Charts of a page: curves of the metrics of runs, reduced to few points with all extremes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.report.axis import XAxis, axis_positions
from hpctrain.report.metric_rows import Row
from hpctrain.report.page.thin import Array, Indices, Middle, corners, extremes, middles

POINTS = 2000
"""Largest number of points of a curve."""

POINTS_OF_CHART = 10_000
"""Largest number of points of all curves of a chart, except for LEAST_POINTS of each."""

LEAST_POINTS = 100
MORE_CHARTS = 16
"""Largest number of charts of unknown keys."""
KEY_LETTERS = 40

_UNSMOOTHED = 200
_LARGEST = 1e300
"""Largest value that counts as a measurement."""

_SPREAD = 20.0
"""Ratio of the largest value to the median above which the axis of values is logarithmic."""
_MOST_STEP = 1 << 53
_LOSS = "loss"
_SET, _BITS = "evaluation/", "bits_per_byte"

Number = str
"""Format of the values of a chart: "plain", "count", "percent", "bytes" or "seconds"."""


@dataclass(frozen=True)
class Chart:
    """Chart of some metrics.

    Attributes:
        name: Title.
        unit: Unit of the values, as text.
        keys: Keys of the metrics, each with its name in the legend.
        number: Format of the values.
        middle: Average that smooths the curves.
        from_zero: True if the axis of values begins at zero.
    """

    name: str
    unit: str
    keys: tuple[tuple[str, str], ...]
    number: Number = "plain"
    middle: Middle = "median"
    from_zero: bool = False


CHARTS = (
    Chart("Loss", "nats per token", ((_LOSS, "training"), ("validation_loss", "validation")), middle="mean"),
    Chart("Reward", "per answer", (("reward", "training"), ("validation_reward", "validation"))),
    Chart("Accuracy", "of pairs", (("accuracy", "training"), ("validation_accuracy", "validation"))),
    Chart("Gradient norm", "before clipping", (("grad_norm", ""),)),
    Chart("Learning rate", "", (("lr", ""),), from_zero=True),
    Chart("Throughput", "tokens per second", (("tokens_per_s", ""),), "count", from_zero=True),
    Chart("Model FLOPs utilization", "of peak FLOP/s", (("mfu", ""),), "percent", from_zero=True),
    Chart("Memory", "peak of a rank", (("peak_rss_bytes", ""),), "bytes", from_zero=True),
    Chart("Step time", "", (("seconds", ""),), "seconds", from_zero=True),
)

_NO_CURVES = frozenset({"step", "tokens", "skipped", "spike", "went_back"})


def charts_of(tables: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """Return the charts of runs as the page's script reads them, without charts that have no curve."""
    known = {key for chart in CHARTS for key, _ in chart.keys}
    sets = dict.fromkeys(key for rows in tables for key in evaluations(rows))
    loss, *others = CHARTS
    loss = Chart(loss.name, loss.unit, (*loss.keys, *((key, _set_of(key)) for key in sets)), middle="mean")
    numeric = list(dict.fromkeys(key for rows in tables for key in _numeric(rows)))
    of_bytes = [key for key in numeric if key.endswith(_BITS)]
    bits = Chart("Bits per byte", "of text", tuple((key, _set_of(key)) for key in of_bytes), middle="mean")
    known |= {*sets, *of_bytes}
    # Perplexities have no charts, since they follow from the losses.
    unknown = [key for key in numeric if key not in known and not key.endswith("perplexity")]
    varying = [key for key in unknown if not _is_constant(tables, key)]
    more = [Chart(key[:KEY_LETTERS], "", ((key, ""),)) for key in varying[:MORE_CHARTS]]
    most = max(LEAST_POINTS, min(POINTS, POINTS_OF_CHART // max(1, len(tables))))
    charts = [_chart(chart, tables, most) for chart in (loss, bits, *others, *more)]
    return [chart for chart in charts if chart["curves"]]


def evaluations(rows: Sequence[Row]) -> list[str]:
    """Return the keys of losses on sets other than the validation split: `evaluation/<name>`."""
    return [key for key in _numeric(rows) if key.startswith(_SET) and "/" not in key.removeprefix(_SET)]


def axis_of(rows: Sequence[Row], axis: XAxis) -> dict[str, Any] | None:
    """Return the axis positions of steps as corners of a line; None if the first step has no position."""
    positions = {step: value for step, value in axis_positions(rows, axis).items() if 0 <= step < _MOST_STEP}
    steps = np.array(sorted(positions), dtype=np.float64)
    if not len(steps) or not rows or rows[0]["step"] not in positions:
        return None
    values = np.array([positions[int(step)] for step in steps], dtype=np.float64)
    selected = corners(steps, values, POINTS)
    return {"steps": _rising(steps[selected]), "values": [_short(value, 9) for value in values[selected]]}


def points(rows: Sequence[Row], key: str) -> tuple[Array, Array]:
    """Return ascending steps and values of rows with a valid number for a key, both [points]."""
    found = {
        row["step"]: float(value)
        for row in rows
        if (value := row.get(key)) is not None and _is_number(value) and 0 <= row["step"] < _MOST_STEP
    }
    steps = sorted(found)
    return np.array(steps, dtype=np.float64), np.array([found[step] for step in steps], dtype=np.float64)


def _chart(chart: Chart, tables: Sequence[Sequence[Row]], most: int) -> dict[str, Any]:
    curves: list[dict[str, Any]] = []
    spread = 1.0
    for run, rows in enumerate(tables):
        for number, (key, name) in enumerate(chart.keys):
            steps, values = points(rows, key)
            if not len(values):
                continue
            few = number > 0 and len(values) <= _UNSMOOTHED
            curve = {"run": run, "key": key, "name": name, "dashed": number > 0, "few": few}
            curves.append(curve | _thinned(steps, values, most, chart.middle))
            if (values > 0).all():
                spread = max(spread, float(values.max() / np.median(values)))
    positive = all(min(curve["values"]) > 0 for curve in curves)
    return {
        "name": chart.name,
        "unit": chart.unit,
        "number": chart.number,
        "middle": chart.middle,
        "zero": chart.from_zero,
        "log": positive and spread > _SPREAD and not chart.from_zero,
        "curves": curves,
    }


def _thinned(steps: Array, values: Array, most: int, middle: Middle) -> dict[str, Any]:
    """Return the points of a curve; if there are many, also averages of sections, for smoothing."""
    selected = extremes(values, most)
    curve: dict[str, Any] = _points_of(steps, values, selected)
    curve["count"] = len(values)
    if len(values) > most:
        centres, averages = middles(values, most // 2, middle)
        curve["middle"] = {
            "steps": _rising(steps[centres]),
            "values": [_short(value, 6) for value in averages],
            "of": len(values) / len(centres),
        }
    return curve


def _points_of(steps: Array, values: Array, selected: Indices) -> dict[str, Any]:
    return {"steps": _rising(steps[selected]), "values": [_short(value, 7) for value in values[selected]]}


def _rising(steps: Array) -> list[int]:
    """Return the first step, and the difference of each step to the one before, as short numbers."""
    whole = steps.astype(np.int64)
    return [int(each) for each in np.diff(whole, prepend=0)]


def _is_constant(tables: Sequence[Sequence[Row]], key: str) -> bool:
    """Return True if a key has the same value everywhere, so that it needs no chart."""
    return len({row[key] for rows in tables for row in rows if _is_number(row.get(key))}) < 2


def _short(value: float, digits: int) -> float | int:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _numeric(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the keys with a number in some row, in the order of their first rows."""
    seen: set[str] = set(_NO_CURVES)
    for row in rows:
        for key, value in row.items():
            if key not in seen and _is_number(value):
                seen.add(key)
                yield key


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _set_of(key: str) -> str:
    """Return the name of a key's set for the legend."""
    return key.removeprefix(_SET).removesuffix(_BITS).strip("/_")[:KEY_LETTERS] or key
