"""Writing a figure to a file, whose suffix decides the format, and labels of axes."""

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
_MARKS = 8
"""Largest number of ticks of an axis."""

_DIGITS = 10
"""Largest number of digits after the point of a label."""
_STEPS = (10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 4 * 3600, 12 * 3600, 86400)


def require_picture_suffix(path: Path) -> None:
    """Check the suffix of a picture's file.

    Raises:
        HpctrainError: It is not that of a picture.
    """
    if path.suffix.lower() not in ENDINGS:
        raise HpctrainError(f"{path}: the name of a picture must end with {either(ENDINGS)}")


def write_figure(path: Path, draw: Callable[[], Figure]) -> None:
    """Draw a figure and write it to a file. Text in SVG remains text.

    Raises:
        HpctrainError: The suffix is not that of a picture.
        InputOutputError: The file cannot be written.
    """
    require_picture_suffix(path)
    with failing_as(f"{path}: the picture cannot be written"), drawing():
        import matplotlib as mpl

        with mpl.rc_context({"svg.fonttype": "none"}):
            draw().savefig(path, format=path.suffix[1:].lower(), dpi=DOTS_PER_INCH)


def time_axis(axes: Axes) -> None:
    """Set ticks of the vertical axis at multiples of seconds, minutes or hours, if it is long enough."""
    from matplotlib.ticker import MultipleLocator

    low, high = axes.get_ylim()
    step = next((each for each in _STEPS if (high - low) / each <= _MARKS), None)
    if high - low > _STEPS[0] and step is not None:
        axes.yaxis.set_major_locator(MultipleLocator(step))
    _label_ticks(axes.yaxis, format_seconds, {"s": 1, "ms": 1e-3, "us": 1e-6})


def bytes_axis(axes: Axes) -> None:
    """Label the ticks of the horizontal axis as sizes in bytes."""
    _label_ticks(axes.xaxis, format_bytes, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1})


def _label_ticks(axis: Axis, label: Callable[[float], str], units: Mapping[str, float]) -> None:
    """Label the ticks of an axis, with as many digits as make the labels different."""
    from matplotlib.ticker import FuncFormatter

    class Labels(FuncFormatter):
        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return distinct_labels(values, label, units)

    axis.set_major_formatter(Labels(lambda value, _: label(value)))


def distinct_labels(
    values: Sequence[float], label: Callable[[float], str], units: Mapping[str, float]
) -> list[str]:
    """Return different labels for values.

    Args:
        values: The values.
        label: Function that returns the label of a value, used if all labels are different.
        units: Units by name, the largest first. Otherwise the unit of the largest value is used.
    """
    labels = [label(value) if value else "0" for value in values]
    largest = max(map(abs, values), default=0.0)
    name, unit = next((each for each in units.items() if each[1] <= largest), list(units.items())[-1])
    for digits in range(_DIGITS):
        if len(set(labels)) == len(set(values)):
            break
        labels = [f"{value / unit:.{digits}f} {name}" for value in values]
    return labels
