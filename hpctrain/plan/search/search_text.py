"""What a search found, in words and a table for people."""

from __future__ import annotations

from itertools import groupby

from hpctrain.plan.search.candidate import Candidate
from hpctrain.plan.search.deck_search import DeckSearch
from hpctrain.plan.search.layout_sentences import arguments, assignments, changed
from hpctrain.plan.time.time_text import WHAT
from hpctrain.report.terminal import columns, fit
from hpctrain.text import command, counted, fitted
from hpctrain.units import format_bytes, format_count, format_seconds

_CAUSES = 3
"""Number of causes of the step time of the best layout that are shown."""

_KINDS = 3
"""Number of kinds of unsupported layouts that are shown."""


def search_text(searched: DeckSearch) -> str:
    """The best layouts, the quickest first, and what became of the others."""
    found, deck = searched.found, searched.deck
    best = found.best
    apart = [key for key in best[0].changes if len({repr(each.changes[key]) for each in best}) > 1]
    alike = {key: value for key, value in changed(deck, best[0].changes).items() if key not in apart}
    head = ("", "step", "slower", "tokens/s", "memory per rank", *(key.partition(".")[2] for key in apart))
    chosen = arguments(changed(deck, best[0].changes))
    tokens = deck.batch.global_size * deck.batch.sequence
    rows = [
        (
            str(number),
            format_seconds(each.seconds),
            f"+{100 * (each.seconds / best[0].seconds - 1):.1f}%" if number > 1 else "-",
            format_count(tokens / each.seconds),
            format_bytes(each.memory_bytes),
            *(_shown(each.changes[key]) for key in apart),
        )
        for number, each in enumerate(best, 1)
    ]
    which = f"the {len(best)} fastest layouts that fit" if len(best) > 1 else "the only layout that fits"
    lines = [
        f"{deck.run.title}: {which} on {counted(searched.ranks, 'rank')} of {searched.machine.name}",
        "",
        *fitted([head, *rows], (), columns()),
        "",
        *([f"In all of them: {assignments(alike)}."] if alike else []),
        _causes(best[0]),
        *_fell(searched),
        f"{command('run', searched.path, *chosen)} trains with the fastest layout.",
    ]
    return "\n".join(line for each in lines for line in fit(each, columns())) + "\n"


def difference(one: Candidate, other: Candidate) -> str:
    """What a layout has otherwise than another one."""
    return assignments({key: value for key, value in one.changes.items() if other.changes[key] != value})


def _shown(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else _plain(value)


def _plain(value: object) -> str:
    """A value; of many parts that have as many blocks how many they are."""
    if not isinstance(value, tuple):
        return str(value)
    runs = ((len(list(alike)), blocks) for blocks, alike in groupby(value))
    return ", ".join(f"{count} x {blocks}" if count > 1 else str(blocks) for count, blocks in runs)


def _causes(best: Candidate) -> str:
    shares = sorted(best.seconds_by_cause.items(), key=lambda each: -each[1])[:_CAUSES]
    told = (f"{100 * seconds / best.seconds:.0f}% {WHAT[cause]}" for cause, seconds in shares if seconds)
    return f"Step time of the fastest layout: {', '.join(told)}."


def _fell(searched: DeckSearch) -> list[str]:
    """What became of the others, kind by kind, and what would change it."""
    found, fell = searched.found, searched.found.fell
    counts = {name: format_count(fell.counts[name]) for name in ("layouts", "memory", "memory plan")}
    lines = [f"Of {counts['layouts']} layouts, and others that were pruned together,"]
    if fell.counts["memory"]:
        least = "were pruned, because their minimum memory does not fit (use more ranks or larger nodes)"
        lines.append(f"  {counts['memory']} {least};")
    if found.missed is not None:
        missed = found.missed
        quickest = format_seconds(missed.candidate.seconds)
        lines.append(
            f"  {counts['memory plan']} do not fit by their memory plans, such as one that takes {quickest} "
            f"({difference(missed.candidate, found.best[0])}): {missed.demand};"
        )
    if found.slower:
        pruned = "were pruned, because all layouts that they stand for are slower"
        lines.append(f"  {format_count(found.slower)} {pruned};")
    told = fell.impossible.most_common(_KINDS)
    lines += [f"  {format_count(count)} are unsupported: {fell.reasons[key]};" for key, count in told]
    rest = fell.impossible.total() - sum(count for _, count in told)
    lines += [f"  {format_count(rest)} are unsupported for other reasons (see --json);"] if rest else []
    if found.untried:
        lines.append(
            f"  {' and '.join(found.untried)}, with less memory and larger bubbles, were not tried "
            "(add --all-schedules);"
        )
    return [*lines[:-1], f"{lines[-1].rstrip(';,')}."]
