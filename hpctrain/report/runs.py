"""Two runs side by side: what they are, what came of them, and the keys in which their decks differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from textwrap import shorten

from hpctrain.checkpoint.provenance import HistorySegment
from hpctrain.deck.schema import Deck
from hpctrain.report.contents import layout_text
from hpctrain.report.differences import changes, value_text
from hpctrain.report.rows import Row
from hpctrain.table import fitted
from hpctrain.units import format_count, format_seconds
from hpctrain.words import counted

_NAMING = frozenset({"run.title", "run.dir"})
_TITLE = 32


@dataclass(frozen=True)
class RunRecord:
    """What is recorded of a run: its last deck, the rows of its steps, the newest run of its chain, if any
    checkpoint tells of it, and the last step.
    """

    path: Path
    deck: Deck
    rows: Mapping[int, Row]
    newest: HistorySegment | None
    last: int


def side_by_side(one: RunRecord, other: RunRecord, width: int | None) -> list[str]:
    """A table of both, in lines of at most `width`: what is told of neither is left out."""
    facts = [_facts(each) for each in (one, other)]
    rows: list[tuple[str, ...]] = [("", "first", "second")]
    rows += [
        (name, *(each[name] or "-" for each in facts))
        for name in facts[0]
        if any(each[name] for each in facts)
    ]
    differing = changes(deck_keys(one.deck), deck_keys(other.deck))
    keys: list[tuple[str, ...]] = [(key, *map(value_text, values)) for key, values in differing.items()]
    if keys:
        keys.insert(0, ("other keys in their decks", "first", "second"))
        return [*fitted(rows, (0, 1, 2), width), "", *fitted(keys, (0, 1, 2), width)]
    return [*fitted(rows, (0, 1, 2), width), "", "Their decks have the same keys."]


def deck_keys(deck: Deck) -> dict[str, object]:
    """Keys and values by "section.key", but those that only name a run."""
    tables = deck.model_dump(by_alias=True, exclude_none=True)
    return {
        f"{section}.{key}": value
        for section, keys in tables.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if f"{section}.{key}" not in _NAMING
    }


def _facts(record: RunRecord) -> dict[str, str]:
    """By name, in words; "" of what is not recorded."""
    newest, rows = record.newest, [record.rows[step] for step in sorted(record.rows)]
    ranks = "" if newest is None else counted(newest.ranks, "rank")
    layout = "" if newest is None else layout_text(newest.layout)
    version = "" if newest is None else newest.versions.get("hpctrain", "")
    commit = "" if newest is None or newest.commit is None else f" ({newest.commit[:8]})"
    seconds = sum(each for row in rows if (each := _number(row, "seconds")) is not None)
    skipped = sum(row.get("skipped") is True for row in rows)
    tokens = _last(rows, "tokens")
    return {
        "run": str(record.path),
        "title": shorten(record.deck.run.title, _TITLE, placeholder="...") or record.deck.run.title[:_TITLE],
        "steps": f"{record.last} of {record.deck.run.steps}" + (f", {skipped} skipped" if skipped else ""),
        "ranks": ranks if layout in {"", "one rank"} else f"{ranks}, {layout}",
        "version": f"{version}{commit}",
        "tokens": "" if tokens is None else format_count(tokens),
        "time": format_seconds(seconds) if seconds else "",
        "loss": _figure(_last(rows, "loss")),
        "validation loss": _figure(_last(rows, "validation_loss")),
        "gradient norm": _figure(_last(rows, "grad_norm")),
    }


def _last(rows: Sequence[Row], key: str) -> float | None:
    found = [each for row in rows if (each := _number(row, key)) is not None]
    return found[-1] if found else None


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
