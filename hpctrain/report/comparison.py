"""Picture of a schedule as it ran, and below it as simulated from the measured times."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.pipeline.simulate import simulate
from hpctrain.report.cells import Cell, arrange, title
from hpctrain.report.fonts import drawable
from hpctrain.report.picture import add_legend, draw_rows
from hpctrain.report.recorded import RecordedStep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARGIN = 1.2
_INCHES_WIDE = (8.0, 32.0)
_MILLISECONDS = 1e3


def draw_comparison(name: str, step: RecordedStep) -> Figure:
    """Return a figure with the measured and the simulated grid of a step over the same time."""
    from matplotlib.figure import Figure

    schedule = step.schedule
    measured, simulated = step.measured(), simulate(schedule, step.times())
    simulated_heading = "simulated from the measured mean times"
    panels = [(f"measured, step {step.step}", measured), (simulated_heading, simulated)]
    rows = {heading: _in_milliseconds(arrange(schedule, result)) for heading, result in panels}
    total = max(cell.end for grid in rows.values() for row in grid for cell in row)
    longest = max(map(len, schedule.stages))
    width = min(max(0.22 * longest + _MARGIN, _INCHES_WIDE[0]), _INCHES_WIDE[1])
    height = 1.6 + 2 * (0.8 + schedule.stage_count * (0.36 if schedule.stage_count <= 32 else 0.26))
    figure = Figure(figsize=(width, height), layout="constrained")
    heading = f"Schedule: {drawable(name)}: {drawable(title(schedule))}"
    figure.suptitle(heading, fontsize=13, x=0.01, ha="left")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (heading, result) in zip(axes, panels, strict=True):
        draw_rows(panel, schedule, rows[heading], (width - _MARGIN) / total)
        cost, ideal = (f"{_MILLISECONDS * seconds:.4g} ms" for seconds in (result.cost, result.ideal))
        figures = f"bubble {100 * result.bubble_rate:.1f}%, cost {cost}, ideal {ideal}"
        panel.set_title(f"{heading}: {figures}", fontsize=11, loc="left", pad=6)
        panel.set_xlabel("")
    axes[0].set_xlim(0, total)
    axes[-1].set_xlabel("time (ms)", fontsize=11)
    add_legend(figure, schedule)
    return figure


def _in_milliseconds(rows: list[list[Cell]]) -> list[list[Cell]]:
    return [
        [replace(cell, start=_MILLISECONDS * cell.start, end=_MILLISECONDS * cell.end) for cell in row]
        for row in rows
    ]
