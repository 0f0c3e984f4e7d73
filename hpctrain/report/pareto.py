"""Picture of memory against time of layouts, with the Pareto frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hpctrain.report.figures import bytes_axis, time_axis
from hpctrain.report.fonts import drawable
from hpctrain.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NAMED = 20
"""Largest number of named candidates of the frontier, evenly selected with both ends."""
_LETTERS = 95
_INCHES = (8.0, 5.0)
_INCHES_OF_ROW = 0.21


@dataclass(frozen=True)
class LayoutCandidate:
    """Candidate, such as a layout.

    Attributes:
        label: Its name.
        seconds: Its time.
        bytes: Memory of the rank that needs most, in bytes.
        limit: Memory that this rank has, in bytes; None if unknown.
    """

    label: str
    seconds: float
    bytes: float
    limit: float | None = None

    @property
    def fits(self) -> bool:
        """True if it needs at most the available memory, or if that is unknown."""
        return self.limit is None or self.bytes <= self.limit


def frontier(candidates: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
    """Return the fitting candidates that no other one beats in both memory and time, by ascending memory."""
    kept = list[LayoutCandidate]()
    fitting = (each for each in candidates if each.fits)
    for each in sorted(fitting, key=lambda each: (each.bytes, each.seconds)):
        if not kept or each.seconds < kept[-1].seconds:
            kept.append(each)
    return kept


def draw_pareto(title: str, candidates: Sequence[LayoutCandidate], seconds_of: str = "step") -> Figure:
    """Return a figure of all candidates, with crosses for those that do not fit and a numbered frontier."""
    from matplotlib.figure import Figure

    best = frontier(candidates)
    named = _spread(best)
    words = [
        f"{number}: {each.label} ({format_seconds(each.seconds)}, {format_bytes(each.bytes)})"
        for number, each in enumerate(named, 1)
    ]
    entries = [fill(drawable(each), _LETTERS, subsequent_indent="     ") for each in words]
    rows = sum(each.count("\n") + 1 for each in entries)
    figure = Figure(figsize=(_INCHES[0], _INCHES[1] + _INCHES_OF_ROW * (rows + 1)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(drawable(title), fontsize=14, loc="left", pad=26)
    fitting = [each for each in candidates if each.fits and each not in best]
    too_large = [each for each in candidates if not each.fits]
    for group, style in (
        (fitting, {"marker": "o", "color": "#56b4e9", "s": 28, "label": "fits"}),
        (too_large, {"marker": "x", "color": "#d55e00", "s": 30, "label": "does not fit"}),
    ):
        if group:
            marks: dict[str, Any] = dict(style)
            axes.scatter([each.bytes for each in group], [each.seconds for each in group], **marks)
    if best:
        line: dict[str, Any] = {"color": "#000000", "linewidth": 1.4, "drawstyle": "steps-post"}
        at = [each.bytes for each in best], [each.seconds for each in best]
        axes.plot(*at, marker="o", markersize=6, label="Pareto front", zorder=3, **line)
    for number, each in enumerate(named, 1):
        place: dict[str, Any] = {"xytext": (5, 5), "textcoords": "offset points", "fontsize": 10}
        axes.annotate(str(number), (each.bytes, each.seconds), zorder=4, **place)
    limits = {each.limit for each in candidates}
    if len(limits) == 1 and (limit := limits.pop()) is not None:
        axes.axvline(
            limit,
            color="#d55e00",
            linestyle="--",
            linewidth=1.2,
            label=f"memory limit: {format_bytes(limit)}",
        )
    least, most = min(each.bytes for each in candidates), max(each.bytes for each in candidates)
    apart = (most - least) or most
    # The axis begins at 0, unless all candidates would then be at its right end.
    axes.set_xlim(0 if least < most / 2 else least - 0.1 * apart, most + 0.06 * apart)
    axes.margins(y=0.12)
    axes.set_xlabel("largest memory per rank", fontsize=12)
    axes.set_ylabel(f"time per {seconds_of}", fontsize=12)
    bytes_axis(axes)
    time_axis(axes)
    axes.tick_params(labelsize=11)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": 4, "frameon": False, "fontsize": 9}
    axes.legend(borderaxespad=0.2, columnspacing=1.2, handletextpad=0.4, **place)
    if entries:
        figure.supxlabel("\n".join(entries), x=0.02, ha="left", fontsize=9)
    return figure


def _spread(best: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
    """Return all candidates, or as many as can be named, with the first and the last one."""
    if len(best) <= _MOST_NAMED:
        return list(best)
    places = {round(number * (len(best) - 1) / (_MOST_NAMED - 1)) for number in range(_MOST_NAMED)}
    return [best[place] for place in sorted(places)]
