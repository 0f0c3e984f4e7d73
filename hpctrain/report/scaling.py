"""Pictures of planned steps: seconds by cause as stacked bars, and scaling over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.report.figures import time_axis
from hpctrain.report.fonts import drawable
from hpctrain.units import format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of Okabe and Ito, and others between them, so that neighbors also differ in lightness.
_COLOURS = (
    *("#0072b2", "#56b4e9", "#b8def5", "#e69f00", "#009e73", "#f0e442", "#cc79a7"),
    *("#d55e00", "#c8c8c8", "#332288", "#882255", "#6e6e6e", "#000000"),
)
_LEAST = 0.01
"""Share of the step time below which causes are drawn together as "other"."""

_REST = "other (less than 1% each)"
_INCHES_HIGH, _INCHES_OF_BAR, _INCHES_LEGEND = 5.0, 0.7, 4.2
_NARROWEST, _WIDEST = 4.0, 40.0
_MOST_NUMBERS = 24
"""Largest number of bars with numbers above them."""


@dataclass(frozen=True)
class PlannedBar:
    """Planned step.

    Attributes:
        label: Label of the bar.
        ranks: Number of ranks.
        causes: Seconds by description of the cause.
        tokens_per_second: Tokens per second.
    """

    label: str
    ranks: int
    causes: Mapping[str, float]
    tokens_per_second: float


def draw_causes(title: str, bars: Sequence[PlannedBar]) -> Figure:
    """Return a figure with a bar for each step."""
    figure, (axes,) = _figure(title, len(bars), 1)
    _stack(axes, bars)
    _legend(axes)
    return figure


def draw_scaling(title: str, bars: Sequence[PlannedBar]) -> Figure:
    """Return a figure of bars over ranks, and of tokens per second with those of ideal scaling."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    ordered = sorted(bars, key=lambda bar: bar.ranks)
    figure, (axes, speeds) = _figure(title, len(ordered), 2)
    _stack(axes, ordered)
    axes.set_xlabel("ranks", fontsize=12)
    ranks, first = [bar.ranks for bar in ordered], ordered[0]
    ideal = [first.tokens_per_second * each / first.ranks for each in ranks]
    speed = [bar.tokens_per_second for bar in ordered]
    speeds.plot(ranks, ideal, color="#6e6e6e", linestyle="--", linewidth=1.4, label="ideal")
    speeds.plot(ranks, speed, color="#0072b2", marker="o", linewidth=1.8, label="planned")
    for x, y, best in zip(ranks, speed, ideal, strict=True):
        offset: tuple[float, float] = (0, -14)
        speeds.annotate(
            f"{100 * y / best:.0f}%",
            (x, y),
            xytext=offset,
            textcoords="offset points",
            fontsize=9,
            ha="center",
        )
    speeds.set_xscale("log")
    speeds.set_yscale("log")
    speeds.set_xticks(ranks, [str(each) for each in ranks])
    speeds.xaxis.set_minor_locator(NullLocator())
    speeds.margins(x=0.08, y=0.15)
    speeds.set_xlabel("ranks", fontsize=12)
    speeds.set_ylabel("tokens per second", fontsize=12)
    speeds.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    speeds.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    speeds.yaxis.set_minor_formatter(NullFormatter())
    _legend(axes)
    speeds.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=10, frameon=False)
    return figure


def _figure(title: str, bars: int, panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    width = min(max(_INCHES_OF_BAR * bars + 1.2, _NARROWEST), _WIDEST) + _INCHES_LEGEND
    figure = Figure(figsize=(width, _INCHES_HIGH + 3.6 * (panels - 1)), layout="constrained")
    shares = [1.4, 1.0][:panels]
    found = list(figure.subplots(panels, 1, squeeze=False, height_ratios=shares)[:, 0])
    found[0].set_title(drawable(title), fontsize=14, loc="left", pad=10)
    for axes in found:
        axes.tick_params(labelsize=11)
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def _stack(axes: Axes, bars: Sequence[PlannedBar]) -> None:
    totals = [sum(bar.causes.values()) for bar in bars]
    names = list(dict.fromkeys(name for bar in bars for name in bar.causes))
    pairs = list(zip(bars, totals, strict=True))
    shown = [name for name in names if any(bar.causes.get(name, 0) > _LEAST * total for bar, total in pairs)]
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    places, floor = range(len(bars)), [0.0] * len(bars)
    for name in shown:
        heights = [bar.causes.get(name, 0.0) for bar in bars]
        style: dict[str, Any] = {
            "color": colours[name],
            "edgecolor": "white",
            "linewidth": 0.5,
            "width": 0.72,
        }
        axes.bar(places, heights, bottom=floor, label=name, **style)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    rest = [total - low for total, low in zip(totals, floor, strict=True)]
    if any(share > 1e-4 * total for share, total in zip(rest, totals, strict=True)):
        axes.bar(
            places,
            rest,
            bottom=floor,
            label=_REST,
            color="white",
            edgecolor="#6e6e6e",
            hatch="///",
            linewidth=0.4,
            width=0.72,
        )
    if len(bars) <= _MOST_NUMBERS:
        for place, total in zip(places, totals, strict=True):
            axes.annotate(
                format_seconds(total),
                (place, total),
                xytext=(0, 3),
                textcoords="offset points",
                fontsize=9,
                ha="center",
            )
    long = any(len(line) > 9 for bar in bars for line in bar.label.split("\n"))
    turned: dict[str, Any] = {"rotation": 90, "fontsize": 9} if long and len(bars) > 4 else {"fontsize": 10}
    axes.set_xticks(places, ["\n".join(map(drawable, bar.label.split("\n"))) for bar in bars], **turned)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("step time (s)", fontsize=12)
    axes.margins(y=0.08)
    axes.autoscale_view()
    time_axis(axes)


def _legend(axes: Axes) -> None:
    """Add a legend of causes in the order of the bars."""
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=10, frameon=False
    )
