"""What a search found, in words and a table for people."""

from __future__ import annotations

from hpctrain.plan.search.candidate import Candidate
from hpctrain.plan.search.deck import DeckSearch
from hpctrain.plan.search.phrases import arguments, assignments
from hpctrain.plan.time.words import WHAT
from hpctrain.report.terminal import columns, fit
from hpctrain.table import fitted
from hpctrain.units import format_bytes, format_count, format_seconds
from hpctrain.words import command_line, counted

_CAUSES = 3
"""Of the best layout's seconds, so many are told."""


def search_text(searched: DeckSearch) -> str:
    """The best layouts, the quickest first, and what became of the others."""
    found, deck = searched.found, searched.deck
    best = found.best
    apart = [key for key in best[0].changes if len({repr(each.changes[key]) for each in best}) > 1]
    alike = {key: value for key, value in best[0].changes.items() if key not in apart and value is not None}
    head = ("", "a step", "tokens/s", "a rank holds", *(key.partition(".")[2] for key in apart))
    tokens = deck.batch.global_size * deck.batch.sequence
    rows = [
        (
            str(number),
            format_seconds(each.seconds),
            format_count(tokens / each.seconds),
            format_bytes(each.memory_bytes),
            *(_shown(each.changes[key]) for key in apart),
        )
        for number, each in enumerate(best, 1)
    ]
    which = f"the {len(best)} quickest layouts that fit" if len(best) > 1 else "the only layout that fits"
    lines = [
        f"{deck.run.title}: {which}, of {counted(searched.ranks, 'rank')} on {searched.machine.name}",
        "",
        *fitted([head, *rows], (), columns()),
        "",
        *([f"All of them: {assignments(alike)}."] if alike else []),
        _causes(best[0]),
        *_fell(searched),
        "The quickest one:",
        f"  {command_line(*arguments(best[0].changes))}",
    ]
    return "\n".join(line for each in lines for line in fit(each, columns())) + "\n"


def difference(one: Candidate, other: Candidate) -> str:
    """What a layout has otherwise than another one."""
    return assignments({key: value for key, value in one.changes.items() if other.changes[key] != value})


def _shown(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else _plain(value)


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _causes(best: Candidate) -> str:
    shares = sorted(best.seconds_by_cause.items(), key=lambda each: -each[1])[:_CAUSES]
    told = (f"{100 * seconds / best.seconds:.0f}% {WHAT[cause]}" for cause, seconds in shares if seconds)
    return f"Of the quickest one's step: {', '.join(told)}."


def _fell(searched: DeckSearch) -> list[str]:
    """What became of the others."""
    found, fell = searched.found, searched.found.fell
    planned = fell.counts["memory plan"]
    lines = [
        f"Of {format_count(fell.counts['layouts'])} whole layouts, and others by what they have in common, "
        f"{format_count(fell.counts['memory'])} hold too much by what they need at the least"
        f"{f', {planned} by their plan' if planned else ''}; "
        f"{format_count(found.slower)} that were left open are slower, whatever else they have."
    ]
    if found.missed is not None:
        missed = found.missed
        lines.append(
            f"One that would take {format_seconds(missed.candidate.seconds)} does not fit "
            f"({difference(missed.candidate, found.best[0])}): {missed.room}."
        )
    reasons = (fell.reasons[key] for key, _ in fell.impossible.most_common(2))
    lines += [
        f"{format_count(fell.impossible.total())} cannot be, such as {each}." for each in list(reasons)[:1]
    ]
    return lines
