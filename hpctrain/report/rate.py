"""Picture of `hpctrain bench rate`: loss of a training with a rising learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import failing_as
from hpctrain.report.fonts import drawable, drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Losses = Sequence[tuple[float, float, float]]
"""Rate, loss and smoothed loss of each step."""

_DOTS_PER_INCH = 150


def draw_rates(
    path: Path, title: str, losses: Losses, suggestion: float | None, figure: str = "loss"
) -> None:
    """Write the picture.

    Raises:
        HpctrainError: matplotlib is not installed.
        InputOutputError: The file cannot be written.
    """
    with failing_as(f"{path}: the picture cannot be written"), drawing():
        picture(title, losses, suggestion, figure).savefig(path, dpi=_DOTS_PER_INCH, format="png")


def picture(title: str, losses: Losses, suggestion: float | None, figure_name: str = "loss") -> Figure:
    """Return a figure of the loss over the logarithm of the rate, smoothed too, and the suggested rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rates, loss, smoothed = zip(*losses, strict=True)
    axes.plot(rates, loss, color="C0", alpha=0.35, linewidth=0.9, label=drawable(figure_name))
    axes.plot(rates, smoothed, color="C0", linewidth=1.8, label="smoothed")
    if suggestion is not None:
        axes.axvline(
            suggestion, color="C1", linestyle="--", linewidth=1.4, label=f"steepest: {suggestion:.2g}"
        )
    axes.set_xscale("log")
    axes.set_title(f"Learning rate: {drawable(title)}", fontsize=14, loc="left", pad=10)
    axes.set_xlabel("learning rate", fontsize=12)
    axes.set_ylabel(drawable(figure_name), fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=10, framealpha=0.85, edgecolor="none")
    return figure
