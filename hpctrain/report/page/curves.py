"""Metrics of runs as the curves of a page: its charts, and of each run few points that tell all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.report.axis import XAxis, places
from hpctrain.report.page.thin import Array, Indices, Middle, corners, extremes, middles
from hpctrain.report.rows import Row

POINTS = 2000  # of a curve at most
POINTS_OF_CHART = 10_000  # of all its curves at most, but for LEAST_POINTS of each
LEAST_POINTS = 100
MORE_CHARTS = 16  # of keys that are not known here
KEY_LETTERS = 40

_UNSMOOTHED = 200
_LARGEST = 1e300  # what is larger is no measurement, and its differences would overflow
_SPREAD = 20.0  # from such a ratio to the median on, one spike would press all else flat
_MOST_STEP = 1 << 53
_LOSS = "loss"
_SET, _BITS = "evaluation/", "bits_per_byte"

Number = str
"""How a chart writes its values: "plain", "count", "percent", "bytes" or "seconds"."""


@dataclass(frozen=True)
class Chart:
    """What a chart shows: its keys in metrics, each with what a legend calls it, and how values are written.

    With `from_zero` the values' axis begins there.
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
    """The charts of the rows of runs, as the page's script reads them; without those that have no curve."""
    known = {key for chart in CHARTS for key, _ in chart.keys}
    sets = dict.fromkeys(key for rows in tables for key in evaluations(rows))
    loss, *others = CHARTS
    loss = Chart(loss.name, loss.unit, (*loss.keys, *((key, _set_of(key)) for key in sets)), middle="mean")
    numeric = list(dict.fromkeys(key for rows in tables for key in _numeric(rows)))
    of_bytes = [key for key in numeric if key.endswith(_BITS)]
    bits = Chart("Bits per byte", "of text", tuple((key, _set_of(key)) for key in of_bytes), middle="mean")
    known |= {*sets, *of_bytes}
    # Perplexity says once more what the loss does.
    unknown = [key for key in numeric if key not in known and not key.endswith("perplexity")]
    told = [key for key in unknown if not _constant(tables, key)]
    more = [Chart(key[:KEY_LETTERS], "", ((key, ""),)) for key in told[:MORE_CHARTS]]
    most = max(LEAST_POINTS, min(POINTS, POINTS_OF_CHART // max(1, len(tables))))
    drawn = [_chart(chart, tables, most) for chart in (loss, bits, *others, *more)]
    return [chart for chart in drawn if chart["curves"]]


def evaluations(rows: Sequence[Row]) -> list[str]:
    """Keys of losses on other sets than the held-out share: `evaluation/<name>`."""
    return [key for key in _numeric(rows) if key.startswith(_SET) and "/" not in key.removeprefix(_SET)]


def axis_of(rows: Sequence[Row], axis: XAxis) -> dict[str, Any] | None:
    """Where steps lie on an axis, told by corners of a line; None where the first has no place."""
    found = {step: place for step, place in places(rows, axis).items() if 0 <= step < _MOST_STEP}
    steps = np.array(sorted(found), dtype=np.float64)
    if not len(steps) or not rows or rows[0]["step"] not in found:
        return None
    values = np.array([found[int(step)] for step in steps], dtype=np.float64)
    kept = corners(steps, values, POINTS)
    return {"steps": _rising(steps[kept]), "values": [_short(value, 9) for value in values[kept]]}


def points(rows: Sequence[Row], key: str) -> tuple[Array, Array]:
    """Rising steps and values of the rows that hold a number that could be measured, both [points]."""
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
    """The points of a curve, and where they are many averages of stretches, which smoothing goes on from."""
    kept = extremes(values, most)
    curve: dict[str, Any] = _points_of(steps, values, kept)
    curve["count"] = len(values)
    if len(values) > most:
        centres, averages = middles(values, most // 2, middle)
        curve["middle"] = {
            "steps": _rising(steps[centres]),
            "values": [_short(value, 6) for value in averages],
            "of": len(values) / len(centres),
        }
    return curve


def _points_of(steps: Array, values: Array, kept: Indices) -> dict[str, Any]:
    return {"steps": _rising(steps[kept]), "values": [_short(value, 7) for value in values[kept]]}


def _rising(steps: Array) -> list[int]:
    """The first step, and by how much each is behind the one before: short numbers."""
    whole = steps.astype(np.int64)
    return [int(each) for each in np.diff(whole, prepend=0)]


def _constant(tables: Sequence[Sequence[Row]], key: str) -> bool:
    """Whether a key has the same value everywhere, as a batch mostly has: nothing to be drawn."""
    return len({row[key] for rows in tables for row in rows if _is_number(row.get(key))}) < 2


def _short(value: float, digits: int) -> float | int:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _numeric(rows: Sequence[Row]) -> Iterator[str]:
    """Keys under which some row has a number, in the order in which they come up."""
    seen: set[str] = set(_NO_CURVES)
    for row in rows:
        for key, value in row.items():
            if key not in seen and _is_number(value):
                seen.add(key)
                yield key


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _set_of(key: str) -> str:
    """What a legend calls the set of which a key is."""
    return key.removeprefix(_SET).removesuffix(_BITS).strip("/_")[:KEY_LETTERS] or key
