"""Comparison of two runs: keys in which their decks differ, and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from textwrap import shorten

from hpctrain.checkpoint.provenance import HistorySegment
from hpctrain.deck.schema import Deck
from hpctrain.report.contents import layout_text
from hpctrain.report.differences import changes, value_texts
from hpctrain.report.metric_rows import Row
from hpctrain.text import counted, fitted
from hpctrain.units import format_bytes, format_count, format_seconds

_NAMING = frozenset({"run.title", "run.dir"})
_TITLE = 32
_FEW = 20
"""Number of rows from which on the mean of the last tenth is shown."""


@dataclass(frozen=True)
class Fact:
    """Property of a run.

    Attributes:
        text: Its value as text; "" if unknown.
        number: Its value if two can be compared, else None.
    """

    text: str
    number: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run folder.

    Attributes:
        path: The folder.
        deck: Last deck of the run.
        rows: Rows of metrics by step.
        newest: Newest run of its chain; None without a checkpoint.
        last: Last step.
    """

    path: Path
    deck: Deck
    rows: Mapping[int, Row]
    newest: HistorySegment | None
    last: int


def side_by_side(one: RunRecord, other: RunRecord, width: int | None) -> list[str]:
    """Return tables of different deck keys and of properties of two runs, as lines.

    The last column has the difference of the second run from the first.

    Args:
        one: The first run.
        other: The second run.
        width: Largest length of a line; None for no limit.
    """
    differing = changes(deck_keys(one.deck), deck_keys(other.deck))
    keys: list[tuple[str, ...]] = [(key, *value_texts(*values)) for key, values in differing.items()]
    if keys:
        lines = fitted([("deck keys that differ", "first", "second"), *keys], (0, 1, 2), width)
    else:
        lines = ["The decks have the same values."]
    facts = [_facts(each) for each in (one, other)]
    rows: list[tuple[str, ...]] = [("", "first", "second", "difference")]
    rows += [
        (
            name,
            *(each[name].text or "-" for each in facts),
            _relative_difference(*(each[name].number for each in facts)),
        )
        for name in facts[0]
        if any(each[name].text for each in facts)
    ]
    return [*lines, "", *fitted(rows, (0, 1, 2), width)]


def deck_keys(deck: Deck) -> dict[str, object]:
    """Return the values of a deck by "section.key", without keys that only name a run."""
    tables = deck.model_dump(by_alias=True, exclude_none=True)
    return {
        f"{section}.{key}": value
        for section, keys in tables.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if f"{section}.{key}" not in _NAMING
    }


def _facts(record: RunRecord) -> dict[str, Fact]:
    """Return the properties of a run by name."""
    newest, rows = record.newest, [record.rows[step] for step in sorted(record.rows)]
    ranks = "" if newest is None else counted(newest.ranks, "rank")
    layout = "" if newest is None else layout_text(newest.layout)
    version = "" if newest is None else newest.versions.get("hpctrain", "")
    commit = "" if newest is None or newest.commit is None else f" ({newest.commit[:8]})"
    skipped = sum(row.get("skipped") is True for row in rows)
    return {
        "run": Fact(str(record.path)),
        "title": Fact(
            shorten(record.deck.run.title, _TITLE, placeholder="...") or record.deck.run.title[:_TITLE]
        ),
        "steps": Fact(
            f"{record.last} of {record.deck.run.steps}" + (f", {skipped} skipped" if skipped else "")
        ),
        "ranks": Fact(ranks if layout in {"", "one rank"} else f"{ranks}, {layout}"),
        "version": Fact(f"{version}{commit}"),
        "tokens": _fact(_last(rows, "tokens"), format_count),
        "time": _fact(sum(_numbers(rows, "seconds")) or None, format_seconds),
        "loss": _fact(_last(rows, "loss"), _figure),
        "loss of the last tenth": _fact(_end(_numbers(rows, "loss")), _figure),
        "validation loss": _fact(_last(rows, "validation_loss"), _figure),
        "best validation loss": _best(rows),
        "gradient norm": Fact(_figure(_last(rows, "grad_norm"))),
        "tokens/s, median": _fact(_middle(_numbers(rows, "tokens_per_s")), format_count),
        "MFU, median": _fact(_middle(_numbers(rows, "mfu")), lambda share: f"{share:.1%}"),
        "memory of rank 0, peak": _fact(max(_numbers(rows, "peak_rss_bytes"), default=None), format_bytes),
        "sent by rank 0": _fact(sum(_numbers(rows, "payload_bytes")) or None, format_bytes),
    }


def _fact(number: float | None, words: Callable[[float], str]) -> Fact:
    return Fact("") if number is None else Fact(words(number), number)


def _relative_difference(one: float | None, other: float | None) -> str:
    """Return the relative difference of two numbers; "" if one is unknown or the first is not above 0."""
    if one is None or other is None or not one > 0:
        return ""
    share = other / one - 1
    return "equal" if other == one else f"{share:+.2%}" if abs(share) < 10 else f"{other / one:.3g} times"


def _best(rows: Sequence[Row]) -> Fact:
    """Return the lowest validation loss and its step."""
    losses = [(each, row["step"]) for row in rows if (each := _number(row, "validation_loss")) is not None]
    if len(losses) < 2:  # else it is the last one
        return Fact("")
    loss, step = min(losses)
    return Fact(f"{_figure(loss)} (step {step})", loss)


def _end(losses: Sequence[float]) -> float | None:
    """Return the mean of the last tenth of losses; None if there are too few."""
    count = len(losses) // 10
    return sum(losses[-count:]) / count if len(losses) >= _FEW else None


def _middle(numbers: Sequence[float]) -> float | None:
    return median(numbers) if numbers else None


def _last(rows: Sequence[Row], key: str) -> float | None:
    losses = _numbers(rows, key)
    return losses[-1] if losses else None


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    return [each for row in rows if (each := _number(row, key)) is not None]


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
