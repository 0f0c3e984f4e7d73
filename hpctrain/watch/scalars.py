"""The figures of a row of metrics one by one, as tables and dashboards take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpctrain.report.rows import Row

Scalar = bool | int | float | str


def scalars(row: Row) -> dict[str, Scalar]:
    """Each figure by its name; one of a list or table is called by its place there, as "experts/load/0"."""
    return dict(_found("", row))


def numbers(row: Row) -> dict[str, float]:
    """Those that are numbers, truth being 1."""
    return {name: float(value) for name, value in _found("", row) if not isinstance(value, str)}


def _found(name: str, value: Any) -> Iterator[tuple[str, Scalar]]:
    if isinstance(value, dict):
        for each, inner in value.items():
            yield from _found(f"{name}/{each}" if name else str(each), inner)
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _found(f"{name}/{place}", inner)
    elif isinstance(value, bool | int | float | str):
        yield name, value
