"""Table of the seconds that slow tests take, which bounds what they cost per commit.

`durations.txt` has one line for each test function of at least `RECORDED` seconds. `tests/run.py --record`
replaces the lines of the tests that it ran; a test without a line runs with every commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import ceil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "durations.txt"

RECORDED = 0.8
"""Tests that take fewer seconds have no line in the table."""
SHARE = 0.75
"""Seconds that one case may cost per commit on average."""
LONGEST_PERIOD = 8
"""Number of commits within which every case runs once on average."""


def read(table: Path = TABLE) -> dict[str, float]:
    """Return the seconds of each recorded test, keyed by its id without parameters."""
    rows = (line.split() for line in table.read_text(encoding="utf-8").splitlines())
    return {name: float(seconds) for seconds, name in rows}


@cache
def periods() -> Mapping[str, int]:
    """Return for each recorded test in how many commits one of its cases runs once on average."""
    return {name: period(seconds) for name, seconds in read().items()}


def period(seconds: float) -> int:
    """Return the number of commits in which a case of so many seconds runs once on average."""
    return min(LONGEST_PERIOD, ceil(round(seconds / SHARE, 3)))


def record(measured: Iterable[tuple[str, float]], table: Path = TABLE) -> None:
    """Write new seconds into the table.

    Args:
        measured: Ids of the cases that ran, with the seconds of each. The line of a test has their mean.
        table: File that is rewritten. Lines of tests that did not run stay, unless the test is gone.
    """
    cases: dict[str, list[float]] = {}
    for case, seconds in measured:
        cases.setdefault(case.partition("[")[0], []).append(seconds)
    means = {name: sum(seconds) / len(seconds) for name, seconds in cases.items()}
    rows = {name: seconds for name, seconds in (read(table) | means).items() if seconds >= RECORDED}
    kept = sorted(name for name in rows if is_test(name))
    table.write_text("".join(f"{rows[name]:.1f} {name}\n" for name in kept), encoding="utf-8")


def is_test(name: str) -> bool:
    """Return True if there is a test function with this id."""
    path, *_, function = name.split("::")
    return (ROOT / path).exists() and f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")
