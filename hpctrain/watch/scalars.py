"""Single values of a row of metrics by name, as tables and dashboards need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpctrain.report.metric_rows import Row

Scalar = bool | int | float | str


def scalars(row: Row) -> dict[str, Scalar]:
    """Return all values of a row by name. Those of lists and tables have names such as "experts/load/0"."""
    return dict(_flatten("", row))


def numbers(row: Row) -> dict[str, float]:
    """Return all values of a row that are numbers, by name. True is 1."""
    return {name: float(value) for name, value in _flatten("", row) if not isinstance(value, str)}


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Scalar]]:
    if isinstance(value, dict):
        for each, inner in value.items():
            yield from _flatten(f"{name}/{each}" if name else str(each), inner)
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _flatten(f"{name}/{place}", inner)
    elif isinstance(value, bool | int | float | str):
        yield name, value
