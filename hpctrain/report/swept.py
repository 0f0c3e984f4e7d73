"""Picture of a sweep: losses of its runs over the values of a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import HpctrainError, failing_as
from hpctrain.report.fonts import drawable, drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 150
_MARKS = "osD^vPX*"
_DECADES_APART = 10


@dataclass(frozen=True)
class SweptRun:
    """Run of a sweep. Numbers are NaN if there is none.

    Attributes:
        values: Values by key, as written.
        loss: Its loss.
        validation: Its validation loss.
        metric: The metric that the user asks for.
    """

    values: Mapping[str, str]
    loss: float
    validation: float
    metric: float = nan


def draw_sweep(path: Path, title: str, runs: Sequence[SweptRun], metric: str = "") -> None:
    """Write the picture.

    Args:
        path: The file.
        title: Title of the picture.
        runs: The runs.
        metric: Name of the metric that the user asks for; "" for the loss.

    Raises:
        HpctrainError: matplotlib is not installed, or no run has a value.
        InputOutputError: The file cannot be written.
    """
    if metric and not any(isfinite(run.metric) for run in runs):
        raise HpctrainError(f"{path}: there is nothing to draw before a run of the sweep has a {metric}")
    if not any(isfinite(run.loss) for run in runs):
        raise HpctrainError(f"{path}: there is nothing to draw before a run of the sweep has a loss")
    with failing_as(f"{path}: the picture cannot be written"), drawing():
        picture(title, runs, metric).savefig(path, dpi=_DOTS_PER_INCH, format="png")


def picture(title: str, runs: Sequence[SweptRun], metric: str = "") -> Figure:
    """Return a figure of the metric of each run over its first key.

    Without a metric, it is the validation loss, or the loss if some runs have no validation loss. Runs with
    equal values of the other keys form a line.
    """
    from matplotlib.figure import Figure

    validated = all(isfinite(run.validation) for run in runs)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    keys = list(runs[0].values)
    first, others = (keys[0], keys[1:]) if keys else ("", [])
    texts = list(dict.fromkeys(run.values.get(first, "") for run in runs))
    numbers = dict(zip(texts, map(_number, texts), strict=True))
    numeric = all(number is not None for number in numbers.values())
    lines: dict[str, list[SweptRun]] = {}
    for run in runs:
        label = ", ".join(f"{key.rpartition('.')[2]} = {run.values[key]}" for key in others)
        lines.setdefault(label, []).append(run)
    for index, (label, members) in enumerate(lines.items()):
        points = []
        for run in members:
            value = run.values.get(first, "")
            number = numbers[value]
            place = number if numeric and number is not None else float(texts.index(value))
            points.append((place, run.metric if metric else run.validation if validated else run.loss))
        points.sort()
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker=_MARKS[index % len(_MARKS)],
            linewidth=1.4,
            label=drawable(label),
        )
    known = [number for number in numbers.values() if number is not None]
    if numeric and min(known) > 0 and max(known) >= _DECADES_APART * min(known):
        axes.set_xscale("log")
    elif not numeric:
        axes.set_xticks(range(len(texts)), [drawable(text) for text in texts])
    axes.set_title(f"Sweep: {drawable(title)}", fontsize=14, loc="left", pad=10)
    axes.set_xlabel(drawable(first), fontsize=12)
    label = "validation loss" if validated else "loss, mean of the last tenth"
    axes.set_ylabel(drawable(metric) or label, fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if others:
        axes.legend(fontsize=10, framealpha=0.85, edgecolor="none")
    return figure


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
