"""Sections of a page below its curves: runs, events, decks, predictions, checkpoints, environment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import fsum
from statistics import median

from hpctrain.report.contents import layout_text
from hpctrain.report.page.curves import evaluations, points
from hpctrain.report.page.markup import cell, details, note, section, table, text
from hpctrain.report.page.run_summary import PredictedVsMeasured, RunSummary
from hpctrain.report.page.schedule_drawing import schedule_of
from hpctrain.report.palette import line_of
from hpctrain.text import counted
from hpctrain.units import format_bytes, format_count, format_seconds

EVENTS = 200
"""Largest number of events of a run, the newest ones."""

DECK_KEYS = 2000
SEGMENTS = 100
CHECKPOINTS = 200
LETTERS = 400
"""Characters of a prompt (the last ones) and of an answer."""

_LONG = "text long"
_LARGEST_PERPLEXITY = 1e43
"""Perplexity from which on none is shown."""

_NAMING = frozenset({"run.title", "run.dir"})
_BAR = 120.0
_MARKED_DEVIATION = 0.1
"""Relative deviation from its prediction above which a measured value is marked."""


def all_sections(runs: Sequence[RunSummary]) -> list[tuple[str, str, str]]:
    """Return name, title and HTML of each section that has content."""
    parts = [
        ("samples", "Sampled answers", _samples(runs)),
        ("events", "Events", _events(runs)),
        ("decks", "Decks" if len(runs) == 1 else "Where the decks differ", _decks(runs)),
        ("predicted", "Predicted and measured", _comparisons(runs)),
        ("schedule", "Schedule and balance of stages", _schedules(runs)),
        ("checkpoints", "Checkpoints", _checkpoints(runs)),
        ("environment", "Environment", _environment(runs)),
    ]
    return [(name, title, html) for name, title, content in parts if (html := section(name, title, content))]


def named(runs: Sequence[RunSummary], index: int) -> str:
    """Return the name of a run with its colour, for tables."""
    return f'<span class="swatch c{line_of(index)[0]}"></span>{text(runs[index].name)}'


def overview(runs: Sequence[RunSummary]) -> str:
    """Return a table with the progress and the results of each run."""
    sets = list(dict.fromkeys(key for run in runs for key in evaluations(run.rows)))[:8]
    head = ["run", "title", "state", "steps", runs[0].counts, "time", "loss", "validation loss", "perplexity"]
    head += [*sets, "gradient norm", f"{runs[0].counts}/s", "MFU", "memory of a rank", "ranks"]
    rows = []
    for index, run in enumerate(runs):
        keys = "tokens", "loss", "validation_loss", "validation_perplexity", "grad_norm"
        last = {key: _last(run, key) for key in (*keys, *sets)}
        held_out, perplexity = last["validation_loss"], last["validation_perplexity"]
        speeds, shares = points(run.rows, "tokens_per_s")[1], points(run.rows, "mfu")[1]
        peaks, seconds = points(run.rows, "peak_rss_bytes")[1], points(run.rows, "seconds")[1]
        state = f'<span class="state {_word(run.state)}">{text(run.state, 20)}</span>' if run.state else ""
        rows.append(
            [
                f'<th class="text">{named(runs, index)}</th>',
                cell(run.title[:80], "text"),
                f'<td class="text">{state}</td>' if state else cell(None),
                cell(
                    f"{run.rows[-1]['step']}" + (f" of {run.facts['steps']}" if "steps" in run.facts else "")
                ),
                cell("" if last["tokens"] is None else format_count(last["tokens"])),
                cell(format_seconds(fsum(seconds)) if len(seconds) else ""),
                cell(_figure(last["loss"])),
                cell(_figure(held_out)),
                cell("" if perplexity is None or perplexity > _LARGEST_PERPLEXITY else f"{perplexity:.5g}"),
                *(cell(_figure(last[key])) for key in sets),
                cell(_figure(last["grad_norm"])),
                cell(format_count(median(speeds)) if len(speeds) else ""),
                cell(f"{100 * median(shares):.3g}%" if len(shares) else ""),
                cell(format_bytes(peaks.max()) if len(peaks) else ""),
                cell(run.facts.get("ranks", "")),
            ]
        )
    shown = [
        index
        for index, words in enumerate(head)
        if words == "run" or any(_filled(row[index]) for row in rows)
    ]
    head, rows = [head[index] for index in shown], [[row[index] for index in shown] for row in rows]
    problems = "".join(note(f"{run.name}: {problem}") for run in runs for problem in run.problems)
    reasons = "".join(note(f"{run.name}: {run.reason}") for run in runs if run.reason)
    explanation = note(
        "Losses and norms are the last ones, speed and MFU are medians of all steps, and memory is the peak."
    )
    return (
        table(head, rows, [index for index, words in enumerate(head) if words in {"run", "title"}])
        + explanation
        + reasons
        + problems
    )


def _word(state: str) -> str:
    """Return a state as the name of a CSS class; "" if it is not a single word."""
    return state if state.isascii() and state.isalpha() else ""


def _filled(html: str) -> bool:
    """Return True if a cell has content."""
    return re.fullmatch(r"<td[^>]*></td>", html) is None


def _last(run: RunSummary, key: str) -> float | None:
    values = points(run.rows, key)[1]
    return float(values[-1]) if len(values) else None


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _events(runs: Sequence[RunSummary]) -> str:
    rows, left = [], []
    for index, run in enumerate(runs):
        shown = run.events[-EVENTS:]
        if len(run.events) > len(shown):
            left.append(
                f"{run.name}: {counted(len(run.events) - len(shown), 'earlier event')} are not shown."
            )
        for event in shown:
            own = [f'<td class="text">{named(runs, index)}</td>'] if len(runs) > 1 else []
            step = "" if event.step is None else str(event.step)
            words = cell(event.words, _LONG)
            rows.append([cell(event.time, "text"), *own, cell(step), cell(event.kind, "text"), words])
    head = ["when", *(["run"] if len(runs) > 1 else []), "step", "what", ""]
    if not rows:
        return note("No events: no stop, hang, spike, fault or warning.")
    marked = (0, 1, 3, 4) if len(runs) > 1 else (0, 2, 3)
    return table(head, rows, marked, "stack tall") + "".join(map(note, left))


def _samples(runs: Sequence[RunSummary]) -> str:
    """Return the answers of policies, newest first."""
    several = sum(bool(run.samples) for run in runs) > 1
    rows = []
    for index, run in enumerate(runs):
        for each in reversed(run.samples):
            own = [f'<td class="text">{named(runs, index)}</td>'] if several else []
            words = cell(each.prompt[-LETTERS:], _LONG), cell(each.text[:LETTERS], _LONG)
            figures = cell(each.rewards[:80]), cell(each.tokens[:20]), cell(each.ended[:20], "text")
            rows.append([*own, cell(each.step), cell(each.of[:20], "text"), *words, *figures])
    if not rows:
        return ""
    head = [*(["run"] if several else []), "step", "of", "prompt", "answer", "reward", "tokens", "ended by"]
    marked = [
        index for index, name in enumerate(head) if name in {"run", "of", "prompt", "answer", "ended by"}
    ]
    return table(head, rows, marked, "stack tall")


def _decks(runs: Sequence[RunSummary]) -> str:
    with_deck = [run for run in runs if run.deck]
    whole = "".join(_deck(run, several=len(runs) > 1) for run in with_deck)
    if len(runs) == 1 or len(with_deck) < len(runs):
        return whole
    keys = dict.fromkeys(key for run in runs for key in run.deck)
    differing = [key for key in keys if len({run.deck.get(key) for run in runs}) > 1 and key not in _NAMING]
    if not differing:
        return note("The decks have the same values.") + whole
    rows = []
    for key in differing[:DECK_KEYS]:
        values = (
            cell(run.deck.get(key, "-"), _LONG if len(run.deck.get(key, "")) > 40 else "") for run in runs
        )
        rows.append([cell(key, "text", head=True), *values])
    return table(["key", *(run.name for run in runs)], rows) + whole


def _deck(run: RunSummary, *, several: bool) -> str:
    rows = [[cell(key, "text", head=True), cell(value, _LONG)] for key, value in run.deck.items()]
    of_run = f" of {run.name}" if several else ""
    return details(
        f"The whole deck{of_run}: {counted(len(rows), 'key')}", table(["key", "value"], rows, (0, 1), "stack")
    )


def _comparisons(runs: Sequence[RunSummary]) -> str:
    """Return the predicted and measured values of all runs side by side."""
    parts = []
    for run in runs:
        of_run = f"{run.name}: " if len(runs) > 1 else ""
        comparisons = [
            f"<div><h4>{text(of_run + each.heading)}</h4>{_comparison(each)}{note(each.note)}</div>"
            for each in run.comparisons
        ]
        parts += [f'<div class="beside">{"".join(comparisons)}</div>'] if comparisons else []
    return "".join(parts)


def _comparison(each: PredictedVsMeasured) -> str:
    pairs = list(each.pairs)
    both = [pair for pair in pairs if pair.predicted is not None and pair.measured is not None]
    parts = pairs[:-1] if each.total else pairs
    largest = max((value or 0.0 for pair in parts for value in pair[1:]), default=0.0)
    rows = []
    for pair in pairs:
        deviation = kind = ""
        if pair.predicted is not None and pair.measured:
            ratio = (pair.predicted - pair.measured) / pair.measured
            deviation, kind = f"{100 * ratio:+.1f}%", "worse" if abs(ratio) > _MARKED_DEVIATION else ""
        cells = (cell("" if value is None else each.written(value)) for value in pair[1:])
        bars = f"<td>{_bars(pair.predicted, pair.measured, largest)}</td>"
        rows.append([cell(pair.words, "text", head=True), *cells, cell(deviation, kind), bars])
    head = ("", "predicted", "measured", "deviation" if both else "", "")
    return table(head, rows)


def _bars(predicted: float | None, measured: float | None, largest: float) -> str:
    if not largest:
        return ""
    bars = "".join(
        f'<rect class="bar {kind}" y="{top}" height="7" '
        f'width="{_BAR * min(1.0, (value or 0.0) / largest):.1f}"/>'
        for kind, value, top in (("predicted", predicted, 0), ("measured", measured, 8))
    )
    return f'<svg width="{_BAR:g}" height="16" aria-hidden="true">{bars}</svg>'


def _schedules(runs: Sequence[RunSummary]) -> str:
    parts = []
    for run in runs:
        if run.step is not None:
            heading = f"<h4>{text(run.name)}</h4>" if len(runs) > 1 else ""
            parts.append(heading + schedule_of(run.step))
    return "".join(parts)


def _checkpoints(runs: Sequence[RunSummary]) -> str:
    rows = []
    for index, run in enumerate(runs):
        for checkpoint in run.checkpoints[:CHECKPOINTS]:
            name = [f'<td class="text">{named(runs, index)}</td>'] if len(runs) > 1 else []
            written, size = cell(checkpoint.written, "text"), cell(format_bytes(checkpoint.size))
            file, links = cell(checkpoint.path.name, "text"), cell(checkpoint.note, _LONG)
            rows.append([*name, file, size, written, links])
    head = [*(["run"] if len(runs) > 1 else []), "file", "size", "written (UTC)", ""]
    left = (0, 1, 3, 4) if len(runs) > 1 else (0, 2, 3)
    return table(head, rows, left, "stack tall") if rows else ""


def _environment(runs: Sequence[RunSummary]) -> str:
    facts = list(dict.fromkeys(key for run in runs for key in run.facts))
    newest = [run.history[-1] if run.history else None for run in runs]
    versions = list(dict.fromkeys(name for each in newest if each is not None for name in each.versions))
    rows = [
        [cell(key, "text", head=True), *(cell(run.facts.get(key, ""), _LONG) for run in runs)]
        for key in facts
    ]
    for label, values in (
        ("layout", ["" if each is None else layout_text(each.layout) for each in newest]),
        ("commit", ["" if each is None else (each.commit or "")[:12] for each in newest]),
        *(
            (name, ["" if each is None else each.versions.get(name, "") for each in newest])
            for name in versions
        ),
        ("computed by", ["" if each is None else ", ".join(each.computed.values()) for each in newest]),
    ):
        if any(values):
            rows.append([cell(label, "text", head=True), *(cell(value, _LONG) for value in values)])
    head = ["", *(run.name for run in runs)]
    return table(head, rows, range(len(head))) + "".join(
        _history(run, several=len(runs) > 1) for run in runs if len(run.history) > 1
    )


def _history(run: RunSummary, *, several: bool) -> str:
    """Return the jobs that led to the newest checkpoint of a run."""
    rows = [
        [
            cell(f"{each.first_step}-{each.last_step}"),
            cell(each.ranks),
            cell(layout_text(each.layout), "text"),
            cell(each.started, "text"),
            cell(each.versions.get("hpctrain", ""), "text"),
            cell((each.commit or "")[:12], "text"),
            cell(each.went_on_from or "", _LONG),
        ]
        for each in run.history[-SEGMENTS:]
    ]
    head = ("steps", "ranks", "layout", "started (UTC)", "version", "commit", "resumed from")
    heading = f"Jobs{f' of {run.name}' if several else ''}, up to the newest checkpoint"
    return f"<h4>{text(heading)}</h4>" + table(head, rows, (2, 3, 4, 5, 6))
