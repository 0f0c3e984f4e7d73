"""Two runs side by side: the keys in which their decks differ, what they are, and what came of them."""

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
from hpctrain.report.rows import Row
from hpctrain.text import counted, fitted
from hpctrain.units import format_bytes, format_count, format_seconds

_NAMING = frozenset({"run.title", "run.dir"})
_TITLE = 32
_FEW = 20
"""Rows of a run of fewer are too few for means of the last tenth to tell more than the last one."""


@dataclass(frozen=True)
class Fact:
    """What is known of a run, in words; "" where it is not. `number` is there where two may be compared."""

    text: str
    number: float | None = None


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
    """Tables of what differs in their decks, and of both, in lines of at most `width`.

    What is told of neither is left out. The last column tells how far a figure of the second is above the
    first one's, or below.
    """
    differing = changes(deck_keys(one.deck), deck_keys(other.deck))
    keys: list[tuple[str, ...]] = [(key, *value_texts(*values)) for key, values in differing.items()]
    if keys:
        lines = fitted([("deck keys that differ", "first", "second"), *keys], (0, 1, 2), width)
    else:
        lines = ["The decks have the same keys."]
    facts = [_facts(each) for each in (one, other)]
    rows: list[tuple[str, ...]] = [("", "first", "second", "difference")]
    rows += [
        (name, *(each[name].text or "-" for each in facts), _apart(*(each[name].number for each in facts)))
        for name in facts[0]
        if any(each[name].text for each in facts)
    ]
    return [*lines, "", *fitted(rows, (0, 1, 2), width)]


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


def _facts(record: RunRecord) -> dict[str, Fact]:
    """By name; those of figures are of the rows there are."""
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


def _apart(one: float | None, other: float | None) -> str:
    """How much more or less the other one is; "" where either is not known, or the first is not above 0."""
    if one is None or other is None or not one > 0:
        return ""
    share = other / one - 1
    return "equal" if other == one else f"{share:+.2%}" if abs(share) < 10 else f"{other / one:.3g} times"


def _best(rows: Sequence[Row]) -> Fact:
    """The lowest validation loss, and the step after which it was."""
    found = [(each, row["step"]) for row in rows if (each := _number(row, "validation_loss")) is not None]
    if len(found) < 2:  # else it is the last one
        return Fact("")
    loss, step = min(found)
    return Fact(f"{_figure(loss)} (step {step})", loss)


def _end(losses: Sequence[float]) -> float | None:
    """The mean of the last tenth, which tells more than the last one, of a run that is long enough."""
    count = len(losses) // 10
    return sum(losses[-count:]) / count if len(losses) >= _FEW else None


def _middle(numbers: Sequence[float]) -> float | None:
    return median(numbers) if numbers else None


def _last(rows: Sequence[Row], key: str) -> float | None:
    found = _numbers(rows, key)
    return found[-1] if found else None


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    return [each for row in rows if (each := _number(row, key)) is not None]


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
