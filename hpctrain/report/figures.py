"""One picture into one file, of the kind that its ending says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import HpctrainError, failing_as
from hpctrain.report.fonts import drawing
from hpctrain.report.plots import DOTS_PER_INCH
from hpctrain.units import format_seconds
from hpctrain.words import either

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
_MARKS = 8  # of an axis at most
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
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    low, high = axes.get_ylim()
    step = next((each for each in _STEPS if (high - low) / each <= _MARKS), None)
    if high - low > _STEPS[0] and step is not None:
        axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value) if value else "0"))
