"""Pictures of loss against sent bytes or against time, with one curve for each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpctrain.deck.schema import fields, sections
from hpctrain.deck.sources import toml_value
from hpctrain.deck.toml import MAX_DECK_BYTES, TomlError, parse_toml
from hpctrain.errors import InputOutputError, failing_as
from hpctrain.files import distinct, read_text
from hpctrain.report.fonts import drawing
from hpctrain.report.plots import (
    DOTS_PER_INCH,
    Array,
    PlottedRun,
    draw_curve,
    load_runs,
    logarithmic,
    make_figure,
)
from hpctrain.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cost = Literal["bytes", "time"]

_KEYS: Mapping[Cost, tuple[str, str]] = {
    "bytes": ("payload_bytes", "payload sent per rank"),
    "time": ("seconds", "training time"),
}
_DECK = "deck.toml"
_NAMING = frozenset({"run.title", "run.dir"})
_LETTERS, _INCHES_OF_ROW = 90, 0.25
"""Largest number of characters of a line of the legend, and the height of such a line."""

_MOST = 1e30
"""Largest cost of a step that counts as a measurement."""

_SPREAD = 10
"""Ratio of the largest to the smallest total cost of the runs above which the cost axis is logarithmic."""


def plot_against(cost: Cost, run_dirs: Sequence[Path], out_dir: Path | None, *, log_loss: bool) -> Path:
    """Draw the loss of runs against their cost as a PNG file.

    Args:
        cost: The cost.
        run_dirs: Run folders.
        out_dir: Folder of the file; None for that of `plot_runs`.
        log_loss: True for a logarithmic axis of losses.

    Returns:
        Path of the file.

    Raises:
        InputOutputError: As in `plot_runs`; or a run has not recorded the cost, or sent nothing.
    """
    run_dirs = distinct(run_dirs)
    runs = load_runs(run_dirs)
    names = (label or run.name for run, label in zip(runs, labels(run_dirs), strict=True))
    runs = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    key, _ = _KEYS[cost]
    problems = [_cost_problem(folder, run, key) for folder, run in zip(run_dirs, runs, strict=True)]
    if any(problems):
        raise InputOutputError([problem for problem in problems if problem])
    folder = out_dir if out_dir is not None else (run_dirs[0] if len(runs) == 1 else Path()) / "plots"
    path = folder / f"loss_against_{cost}.png"
    with failing_as(f"{folder}: pictures cannot be written"), drawing():
        figure = draw_against(cost, runs, log_loss=log_loss)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DOTS_PER_INCH)
    return path


def _cost_problem(folder: Path, run: PlottedRun, key: str) -> str:
    """Return why the costs of a run cannot be drawn; "" if they can."""
    if not any(key in row for row in run.rows):
        return f"{folder}: its metrics have no {key}, which runs of this version record"
    for row in run.rows:
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
            problem = "no" if value is None else "an invalid"
            return f"{folder}: step {row['step']} has {problem} {key}, so the cost of later steps is unknown"
    if any(row[key] for row in run.rows):
        return ""
    return f"{folder}: the run sent no bytes, so --against bytes cannot draw it"


def draw_against(cost: Cost, runs: Sequence[PlottedRun], *, log_loss: bool = False) -> Figure:
    """Return the figure: training loss as lines, validation loss as marks of the same colour."""
    from matplotlib.ticker import FuncFormatter

    key, words = _KEYS[cost]
    figure, (axes,) = make_figure(f"Loss against {cost}", ["loss (nats per token; points: held out)"], runs)
    totals = []
    for index, run in enumerate(runs):
        costs = cumulative_costs(run, key)
        totals.append(max(costs.values()))
        draw_curve(axes, _against(run, "loss", costs), index, run.label, "mean")
        held_out = _against(run, "validation_loss", costs)
        style: dict[str, Any] = {"linestyle": "--", "marker": "o", "markersize": 4, "linewidth": 1.2}
        if len(held_out[0]):
            axes.plot(*held_out, color=f"C{index}", **style)
    axes.set_xlabel(words, fontsize=12)
    if max(totals) > _SPREAD * min(totals):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    written = format_bytes if cost == "bytes" else format_seconds
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value) if value else "0"))
    if log_loss:
        logarithmic(axes)
    _legend_below(figure)
    return figure


def _legend_below(figure: Figure) -> None:
    """Add a legend below the curves if there are several. Its entries may have several lines."""
    (axes,) = figure.axes
    curves, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        entries = [fill(name, _LETTERS, subsequent_indent="  ") for name in names]
        rows = sum(each.count("\n") + 1 for each in entries)
        figure.set_figheight(figure.get_figheight() + _INCHES_OF_ROW * rows)
        figure.legend(curves, entries, loc="outside lower left", fontsize=10, frameon=False)


def cumulative_costs(run: PlottedRun, key: str) -> dict[int, float]:
    """Return the sum of a run's costs up to each step, by step."""
    costs: dict[int, float] = {}
    total = 0.0
    for row in run.rows:
        total += row[key]
        costs[row["step"]] = total
    return costs


def labels(run_dirs: Sequence[Path]) -> list[str]:
    """Return the keys in which the decks of runs differ, as a label for each run.

    A label leaves out default values, and the section of a key if its name is unique. All labels are "" if
    they do not distinguish the runs.
    """
    decks = [_keys(run_dir / _DECK) for run_dir in run_dirs]
    names = {name for deck in decks for name in deck} - _NAMING
    differing = sorted(name for name in names if len({toml_value(deck.get(name)) for deck in decks}) > 1)
    keys = {section: fields(section) for section in sections()}
    usual = {f"{section}.{name}": own[name].default for section, own in keys.items() for name in own}

    short = Counter(name.partition(".")[2] for name in differing)

    def short_name(name: str) -> str:
        key = name.partition(".")[2]
        return key if short[key] == 1 else name

    def label(deck: Mapping[str, object]) -> str:
        values = ((name, deck[name]) for name in differing if name in deck and deck[name] != usual.get(name))
        return ", ".join(f"{short_name(name)} = {value}" for name, value in values)

    texts = [label(deck) for deck in decks]
    return texts if all(decks) and len(set(texts)) == len(texts) else [""] * len(texts)


def _keys(path: Path) -> dict[str, object]:
    """Return the values of a deck by full names of their keys; {} if it cannot be read."""
    try:
        values, _ = parse_toml(read_text(path, MAX_DECK_BYTES))
    except (OSError, UnicodeDecodeError, TomlError):
        return {}
    tables = ((section, table) for section, table in values.items() if isinstance(table, dict))
    return {f"{section}.{name}": value for section, table in tables for name, value in table.items()}


def _against(run: PlottedRun, key: str, costs: Mapping[int, float]) -> tuple[Array, Array]:
    """Return the costs up to the steps with a metric, and the values of the metric, both [points]."""
    steps, values = run.series(key)
    return np.array([costs[int(step)] for step in steps], dtype=np.float64), values
