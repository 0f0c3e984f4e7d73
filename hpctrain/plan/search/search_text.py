"""Table and sentences about the result of a search."""

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
    """Return a table of the best layouts, and sentences about the others."""
    result, deck = searched.result, searched.deck
    best = result.best
    varied_keys = [key for key in best[0].changes if len({repr(each.changes[key]) for each in best}) > 1]
    common_values = {
        key: value for key, value in changed(deck, best[0].changes).items() if key not in varied_keys
    }
    head = (
        "",
        "step",
        "slower",
        "tokens/s",
        "memory per rank",
        *(key.partition(".")[2] for key in varied_keys),
    )
    chosen = arguments(changed(deck, best[0].changes))
    tokens = deck.batch.global_size * deck.batch.sequence
    rows = [
        (
            str(number),
            format_seconds(each.seconds),
            f"+{100 * (each.seconds / best[0].seconds - 1):.1f}%" if number > 1 else "-",
            format_count(tokens / each.seconds),
            format_bytes(each.memory_bytes),
            *(_cell(each.changes[key]) for key in varied_keys),
        )
        for number, each in enumerate(best, 1)
    ]
    which = f"the {len(best)} fastest layouts that fit" if len(best) > 1 else "the only layout that fits"
    lines = [
        f"{deck.run.title}: {which} on {counted(searched.ranks, 'rank')} of {searched.machine.name}",
        "",
        *fitted([head, *rows], (), columns()),
        "",
        *([f"In all of them: {assignments(common_values)}."] if common_values else []),
        _causes(best[0]),
        *_rejected(searched),
        f"{command('run', searched.path, *chosen)} trains with the fastest layout.",
    ]
    return "\n".join(line for each in lines for line in fit(each, columns())) + "\n"


def difference(one: Candidate, other: Candidate) -> str:
    """Return the keys and values in which a layout differs from another one."""
    return assignments({key: value for key, value in one.changes.items() if other.changes[key] != value})


def _cell(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else _plain(value)


def _plain(value: object) -> str:
    """Return a value as text. Equal numbers of blocks of consecutive parts are joined, such as "3 x 2"."""
    if not isinstance(value, tuple):
        return str(value)
    runs = ((len(list(parts)), blocks) for blocks, parts in groupby(value))
    return ", ".join(f"{count} x {blocks}" if count > 1 else str(blocks) for count, blocks in runs)


def _causes(best: Candidate) -> str:
    shares = sorted(best.seconds_by_cause.items(), key=lambda each: -each[1])[:_CAUSES]
    shown = (f"{100 * seconds / best.seconds:.0f}% {WHAT[cause]}" for cause, seconds in shares if seconds)
    return f"Step time of the fastest layout: {', '.join(shown)}."


def _rejected(searched: DeckSearch) -> list[str]:
    """Return sentences about the rejected layouts, by kind, and what would change this."""
    result, rejected = searched.result, searched.result.rejected
    counts = {name: format_count(rejected.counts[name]) for name in ("layouts", "memory", "memory plan")}
    lines = [f"Of {counts['layouts']} layouts, and others that were pruned together,"]
    if rejected.counts["memory"]:
        least = "were pruned, because their minimum memory does not fit (use more ranks or larger nodes)"
        lines.append(f"  {counts['memory']} {least};")
    if result.missed is not None:
        missed = result.missed
        quickest = format_seconds(missed.candidate.seconds)
        lines.append(
            f"  {counts['memory plan']} do not fit by their memory plans, such as one that takes {quickest} "
            f"({difference(missed.candidate, result.best[0])}): {missed.demand};"
        )
    if result.slower:
        pruned = "were pruned, because all layouts that they stand for are slower"
        lines.append(f"  {format_count(result.slower)} {pruned};")
    shown = rejected.impossible.most_common(_KINDS)
    lines += [f"  {format_count(count)} are unsupported: {rejected.reasons[key]};" for key, count in shown]
    rest = rejected.impossible.total() - sum(count for _, count in shown)
    lines += [f"  {format_count(rest)} are unsupported for other reasons (see --json);"] if rest else []
    if result.untried:
        lines.append(
            f"  {' and '.join(result.untried)}, with less memory and larger bubbles, were not tried "
            "(add --all-schedules);"
        )
    return [*lines[:-1], f"{lines[-1].rstrip(';,')}."]
