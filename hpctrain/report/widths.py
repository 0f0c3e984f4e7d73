"""Picture of `hpctrain bench mup`: spreads by width and step, and losses by rate and width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import failing_as
from hpctrain.report.fonts import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Spreads = Mapping[str, Mapping[str, Mapping[int, list[float]]]]
"""Spread of each step by parametrization, kind of value and width."""
Losses = Mapping[str, Mapping[int, Mapping[float, float]]]
"""Loss by parametrization, width and rate."""
Best = Callable[[Mapping[float, float]], float | None]

_DOTS_PER_INCH = 150


def draw_widths(path: Path, spreads: Spreads, losses: Losses, best: Best) -> None:
    """Write the picture.

    Raises:
        HpctrainError: matplotlib is not installed.
        InputOutputError: The file cannot be written.
    """
    with failing_as(f"{path}: the picture cannot be written"), drawing():
        picture(spreads, losses, best).savefig(path, dpi=_DOTS_PER_INCH, format="png")


def picture(spreads: Spreads, losses: Losses, best: Best) -> Figure:
    """Return a figure with a row per parametrization, and panels for each kind of value and for losses."""
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names, kinds = list(spreads), list(next(iter(spreads.values())))
    columns = len(kinds) + bool(losses)
    figure = Figure(figsize=(2.9 * columns + 1, 3.1 * len(names) + 0.4), layout="constrained")
    panels = figure.subplots(len(names), columns, squeeze=False)
    colours = mpl.colormaps["viridis"]
    steps = len(next(iter(next(iter(spreads.values()))[kinds[0]].values())))
    for row, name in zip(panels, names, strict=True):
        for axes, kind in zip(row, kinds, strict=False):
            by_width = spreads[name][kind]
            for step in range(steps):
                values = [each[step] for each in by_width.values()]
                axes.plot(list(by_width), values, color=colours(step / max(1, steps - 1)), marker=".", lw=1.2)
            _style(axes, list(by_width), kind.replace("_", "-"), "width")
        row[0].set_ylabel(f"{name}\nstandard deviation", fontsize=11)
        if losses:
            _draw_losses(row[-1], losses[name], best)
    for column, _ in enumerate(kinds):
        _same_scale([row[column] for row in panels])
    if losses:
        _same_scale([row[-1] for row in panels])
    mappable = ScalarMappable(Normalize(0, max(1, steps - 1)), colours)
    bar = figure.colorbar(mappable, ax=list(panels[:, len(kinds) - 1]), pad=0.02, label="step")
    bar.locator = MaxNLocator(integer=True)
    bar.update_ticks()
    return figure


def _draw_losses(axes: Axes, by_width: Mapping[int, Mapping[float, float]], best: Best) -> None:
    """Draw a line for each width, and a mark at its best rate."""
    for number, (width, losses) in enumerate(by_width.items()):
        finite = {rate: loss for rate, loss in losses.items() if isfinite(loss)}
        (line,) = axes.plot(
            list(finite), list(finite.values()), color=f"C{number}", marker=".", lw=1.2, label=str(width)
        )
        rate = best(losses)
        if rate is not None:
            axes.axvline(rate, color=line.get_color(), lw=0.9, ls="--")
    axes.set_xscale("log")
    axes.set_title("loss and best learning rate", fontsize=11, loc="left")
    axes.set_xlabel("learning rate", fontsize=10)
    axes.legend(title="width", fontsize=8, title_fontsize=8)
    axes.grid(alpha=0.25)


def _style(axes: Axes, widths: list[int], title: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(widths, [str(width) for width in widths], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(label, fontsize=10)
    axes.grid(alpha=0.25)


def _same_scale(panels: list[Any]) -> None:
    """Set the same range of values in all panels."""
    limits = [axes.get_ylim() for axes in panels]
    for axes in panels:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
