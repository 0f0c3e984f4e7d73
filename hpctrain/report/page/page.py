"""Report page: its head with a policy that forbids requests, its curves, and sections below them."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.resources import files
from typing import Any

from hpctrain import __version__
from hpctrain.report.axis import AXES
from hpctrain.report.marks import KINDS, StepMark
from hpctrain.report.page.curves import axis_of, charts_of
from hpctrain.report.page.markup import embedded, section, text
from hpctrain.report.page.run_summary import RunSummary
from hpctrain.report.page.sections import all_sections, named, overview
from hpctrain.report.palette import DASHES, ON_DARK, ON_LIGHT, line_of

HEAD = "<!doctype html>\n<!-- hpctrain report -->\n"
"""Beginning of each page, by which reports are recognized."""

MARKS = 300
"""Largest number of events of a kind that a run's curves show."""
MARK_LETTERS = 160

_LIGHT = {"page": "#ffffff", "card": "#ffffff", "ink": "#1b1f24", "soft": "#57606a", "edge": "#c9d1d9"}
_LIGHT |= {"line": "#e6e9ec", "link": "#0072b2", "bad": "#b00020"}
_DARK = {"page": "#14171b", "card": "#1b1f25", "ink": "#e6e9ed", "soft": "#9aa4af", "edge": "#3a424c"}
_DARK |= {"line": "#2b3138", "link": "#56b4e9", "bad": "#ff8a80"}

_SHAPES = {
    "resumed": "M0-5L5 4H-5Z",
    "went back": "M-5 0L4-5V5Z",
    "spike": "M-4-4L4 4M-4 4L4-4",
    "skipped": "M-4 0H4M0-4V4",
    "fault": "M0-6L5 0L0 6L-5 0Z",
}
_KIND_WORDS = {
    "resumed": "resumed from a checkpoint",
    "went back": "returned to a state before a spike",
    "spike": "spike, update skipped",
    "skipped": "not finite, update skipped",
    "fault": "silent fault",
}


def page(runs: Sequence[RunSummary], made: datetime | None = None) -> str:
    """Return the page of at least one run. All runs have rows."""
    style = _style() + _read("page.css")
    script = _read("page.js")
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    policy += "; base-uri 'none'; form-action 'none'"
    when = (made or datetime.now(timezone.utc)).strftime("%Y-%m-%d %H:%M UTC")
    title = f"{runs[0].title or runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    parts = all_sections(runs)
    links = [("runs", "Runs"), ("curves", "Curves"), *((name, words) for name, words, _ in parts)]
    body = [
        f"<main><header><div><h1>{text(title, 120)}</h1>",
        f'<div class="made">hpctrain {text(__version__)}, {when}</div><nav>',
        *(f'<a href="#{name}">{text(words)}</a>' for name, words in links),
        f"</nav></div>{_THEME}</header>",
        section("runs", "Runs" if len(runs) > 1 else "Run", overview(runs)),
        section("curves", "Curves", _controls(runs)),
        *(html for _, _, html in parts),
        "</main>",
        f'<script type="application/json" id="data">{embedded(data_of(runs))}</script>',
        f"<script>{script}</script>",
    ]
    return (
        f'{HEAD}<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="referrer" content="no-referrer"><title>{text(title, 120)}: hpctrain report</title>'
        f"<style>{style}</style></head><body>{''.join(body)}</body></html>\n"
    )


def data_of(runs: Sequence[RunSummary]) -> dict[str, Any]:
    """Return the data that the page's script draws."""
    run_data = []
    for index, run in enumerate(runs):
        colour, _ = line_of(index)
        axes = {axis: axis_of(run.rows, axis) for axis in ("tokens", "time")}
        dashes = index // len(ON_LIGHT) % len(DASHES)
        marks = [
            {"step": mark.step, "kind": mark.kind, "words": mark.words[:MARK_LETTERS]}
            for mark in limit_marks(run.marks)
        ]
        run_data.append({"name": run.name[:120], "colour": colour, "dashes": dashes, "marks": marks, **axes})
    return {
        "colours": len(ON_LIGHT),
        "counts": runs[0].counts,
        "shapes": _SHAPES,
        "runs": run_data,
        "charts": charts_of([run.rows for run in runs]),
    }


def limit_marks(marks: Sequence[StepMark]) -> list[StepMark]:
    """Return at most `MARKS` events of each kind, evenly selected, in the order of their steps."""
    counts = Counter(mark.kind for mark in marks)
    limited: list[StepMark] = []
    for kind, count in counts.items():
        of_kind = [mark for mark in marks if mark.kind == kind]
        limited += of_kind[:: -(-count // MARKS)]
    return sorted(limited, key=lambda mark: mark.step)


def _controls(runs: Sequence[RunSummary]) -> str:
    """Return the controls for axis, smoothing and runs, which the script connects."""
    axes = "".join(
        f'<label><input type="radio" name="axis" value="{axis}"{" checked" if axis == "steps" else ""}> '
        f"{text(runs[0].counts if axis == 'tokens' else axis)}</label>"
        for axis in AXES
        if all(axis == "steps" or axis_of(run.rows, axis) is not None for run in runs)
    )
    shown = "".join(
        f'<li><label><input type="checkbox" data-run="{index}" checked> {named(runs, index)}</label></li>'
        for index in range(len(runs))
    )
    counts = Counter(mark.kind for run in runs for mark in run.marks)
    keys = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><path transform="translate(7 7)" '
        f'class="mark {kind.replace(" ", "-")} single" d="{_SHAPES[kind]}"/></svg>'
        f"{_KIND_WORDS[kind]} ({counts[kind]})</li>"
        for kind in KINDS
        if counts[kind]
    )
    return (
        "<noscript><p>The curves are drawn by a script within this page, which is not allowed to run here."
        "</p></noscript>"
        f'<div class="controls" data-scripted hidden><fieldset>{axes}</fieldset>'
        '<label>smoothing <input type="range" id="smooth" min="0" max="6" step="1" value="0"> '
        '<output id="smoothing"></output></label>'
        '<label><input type="checkbox" id="marks" checked> marks</label>'
        '<button type="button" id="whole" hidden>whole run</button></div>'
        + (f'<ul class="runs" data-scripted hidden>{shown}</ul>' if len(runs) > 1 else "")
        + (f'<ul class="keys">{keys}</ul>' if keys else "")
        + '<p class="note" data-scripted hidden>Values beside names are those under the pointer, or the last '
        "ones; drag over a curve to look closer, and click twice to see all of it again.</p>"
        '<svg width="0" height="0" aria-hidden="true"></svg><div id="charts"></div>'
    )


_THEME = (
    '<label class="theme" data-scripted hidden>colours <select id="theme"><option value="">as the system'
    '</option><option value="light">light</option><option value="dark">dark</option></select></label>'
)


def _style() -> str:
    """Return the style sheet with light and dark colours and the classes of runs."""
    light = _variables(_LIGHT, ON_LIGHT)
    dark = _variables(_DARK, ON_DARK)
    classes = "".join(f".c{index}{{--c:var(--c{index})}}" for index in range(len(ON_LIGHT)))
    dashes = "".join(
        f".d{index}{{stroke-dasharray:{' '.join(f'{length:g}' for length in dash) or 'none'}}}"
        for index, dash in enumerate(DASHES)
    )
    return (
        f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n@media print{{:root:root:root{{{light}}}}}\n{classes}{dashes}\n"
    )


def _variables(colours: dict[str, str], runs: Sequence[str]) -> str:
    variables = colours | {f"c{index}": colour for index, colour in enumerate(runs)}
    return "".join(f"--{name}:{colour};" for name, colour in variables.items())


def _read(name: str) -> str:
    return (files("hpctrain.report.page") / name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    """Return the hash by which the policy lets a browser run only this script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
