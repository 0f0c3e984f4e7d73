"""One picture into one file, of the kind that its ending says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import HpctrainError, failing_as
from hpctrain.report.fonts import drawing
from hpctrain.report.plots import DOTS_PER_INCH
from hpctrain.text import either
from hpctrain.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
_MARKS = 8  # of an axis at most
_DIGITS = 10  # after the point, of a mark at most
_STEPS = (10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 4 * 3600, 12 * 3600, 86400)


def demand_ending(path: Path) -> None:
    """HpctrainError where a file's ending is no picture's."""
    if path.suffix.lower() not in ENDINGS:
        raise HpctrainError(f"{path}: is to be a picture: its name must end with {either(ENDINGS)}")


def write_figure(path: Path, draw: Callable[[], Figure]) -> None:
    """Draw a figure into a file; text in SVG stays text. HpctrainError as `demand_ending`, InputOutputError
    where nothing can be written.
    """
    demand_ending(path)
    with failing_as(f"{path}: the picture cannot be written"), drawing():
        import matplotlib as mpl

        with mpl.rc_context({"svg.fonttype": "none"}):
            draw().savefig(path, format=path.suffix[1:].lower(), dpi=DOTS_PER_INCH)


def time_axis(axes: Axes) -> None:
    """Marks upwards at seconds, minutes or hours that people count in, where the axis reaches so far."""
    from matplotlib.ticker import MultipleLocator

    low, high = axes.get_ylim()
    step = next((each for each in _STEPS if (high - low) / each <= _MARKS), None)
    if high - low > _STEPS[0] and step is not None:
        axes.yaxis.set_major_locator(MultipleLocator(step))
    _label(axes.yaxis, format_seconds, {"s": 1, "ms": 1e-3, "us": 1e-6})


def bytes_axis(axes: Axes) -> None:
    """Marks to the right told as sizes."""
    _label(axes.xaxis, format_bytes, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1})


def _label(axis: Axis, usual: Callable[[float], str], units: Mapping[str, float]) -> None:
    """As usual, or where marks would be told alike with as many digits as tell them apart."""
    from matplotlib.ticker import FuncFormatter

    class Labels(FuncFormatter):
        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return distinct(values, usual, units)

    axis.set_major_formatter(Labels(lambda value, _: usual(value)))


def distinct(values: Sequence[float], usual: Callable[[float], str], units: Mapping[str, float]) -> list[str]:
    """Labels of values, each another. Of several units, the largest first, that of the largest value."""
    labels = [usual(value) if value else "0" for value in values]
    largest = max(map(abs, values), default=0.0)
    name, unit = next((each for each in units.items() if each[1] <= largest), list(units.items())[-1])
    for digits in range(_DIGITS):
        if len(set(labels)) == len(set(values)):
            break
        labels = [f"{value / unit:.{digits}f} {name}" for value in values]
    return labels
