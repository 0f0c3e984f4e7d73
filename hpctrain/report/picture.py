"""Pictures of schedules: a grid with a row for each stage and time to the right, and marks on problems."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import failing_as
from hpctrain.pipeline.action import Kind, Schedule
from hpctrain.report.cells import KINDS, Cell, arrange, colour_of, is_light, kinds_of, number_text, rgb, title
from hpctrain.report.fonts import drawable, drawing
from hpctrain.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpctrain.pipeline.schedule_check import ScheduleProblem
    from hpctrain.pipeline.simulate import Simulation

_MARK = "#d00000"
_INCHES_WIDE = (8.0, 48.0)
_DOTS_PER_INCH = 150
_MOST_NUMBERS = 12_000


def png(
    schedule: Schedule,
    simulation: Simulation | None,
    path: Path | str,
    problems: Sequence[ScheduleProblem] = (),
) -> None:
    """Write a schedule as a PNG file.

    Args:
        schedule: The schedule.
        simulation: Its simulation; None if it cannot run.
        path: The file.
        problems: Problems of the schedule, which are framed and described.

    Raises:
        InputOutputError: The file cannot be written.
    """
    with failing_as(f"{path}: the picture cannot be written"), drawing():
        draw(schedule, simulation, problems).savefig(path, format="png", dpi=_DOTS_PER_INCH)


def draw(
    schedule: Schedule, simulation: Simulation | None, problems: Sequence[ScheduleProblem] = ()
) -> Figure:
    """Return the figure that `png` writes."""
    from matplotlib.figure import Figure

    rows = arrange(schedule, simulation)
    total = max((cell.end for row in rows for cell in row), default=1.0)
    spans = sorted(cell.end - cell.start for row in rows for cell in row if cell.end > cell.start)
    digits = len(str(schedule.micro_batches - 1))
    comfortable = (0.10 + 0.08 * digits) / max(spans[len(spans) // 10], spans[-1] / 4) if spans else 1.0
    width = min(max(comfortable * total + 2.2, _INCHES_WIDE[0]), _INCHES_WIDE[1])
    reasons = [drawable(str(problem)) for problem in problems]
    lines = [line for reason in reasons[:4] for line in textwrap.wrap(reason, int(12 * width))]
    lines += [f"and {len(reasons) - 4} more"] if len(reasons) > 4 else []
    height = 1.9 + 0.2 * len(lines) + schedule.stage_count * (0.36 if schedule.stage_count <= 32 else 0.26)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    draw_rows(axes, schedule, rows, (width - 2.2) / total)
    _frame_problems(axes, rows, problems)
    heading = drawable(title(schedule))
    if problems:
        heading += f": {counted(len(problems), 'problem')}"
    if simulation is not None and not problems:
        heading += f": bubble rate {100 * simulation.bubble_rate:.2f}%"
        cost, ideal = number_text(simulation.cost), number_text(simulation.ideal)
        lines = [f"cost {cost}, ideal {ideal}; the numbers are micro-batches"]
        _stage_columns(axes, simulation)
    axes.set_title(heading, fontsize=13, loc="left", pad=8 + 14 * len(lines))
    style: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 10}
    colour = _MARK if problems else "#404040"
    for number, line in enumerate(reversed(lines)):
        axes.annotate(line, (0, 1), xytext=(0, 6 + 14 * number), color=colour, **style)
    add_legend(figure, schedule, is_complete=all(cell.reached for row in rows for cell in row))
    return figure


def draw_rows(axes: Axes, schedule: Schedule, rows: Sequence[Sequence[Cell]], inches: float) -> None:
    """Draw cells, a row a stage, with the stage axis; `inches` is the width of a unit of time."""
    from matplotlib.collections import PolyCollection

    groups: dict[tuple[Kind, int, bool], list[list[tuple[float, float]]]] = {}
    for stage, row in enumerate(rows):
        top, bottom = stage - 0.42, stage + 0.42
        for cell in row:
            box = [(cell.start, top), (cell.end, top), (cell.end, bottom), (cell.start, bottom)]
            groups.setdefault((cell.action.kind, cell.action.chunk, cell.reached), []).append(box)
    median = sorted(cell.end - cell.start for row in rows for cell in row) or [0.0]
    edge = min(0.8, 4 * inches * median[len(median) // 2])
    for (kind, chunk, reached), boxes in groups.items():
        face = rgb(colour_of(kind, chunk, schedule.chunks))
        style: dict[str, Any] = {"facecolors": [face], "edgecolors": "white", "linestyles": "-"}
        if not reached:
            style = {"facecolors": [(*face, 0.25)], "edgecolors": "#707070", "linestyles": ":"}
        axes.add_collection(PolyCollection(boxes, linewidths=edge, **style), autolim=False)
    _write_numbers(axes, schedule, rows, inches)
    axes.set_xlim(0, max((cell.end for row in rows for cell in row), default=1.0))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [str(stage) for stage in range(len(rows))])
    axes.tick_params(labelsize=10)
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("stage", fontsize=11)
    axes.set_xlabel("time", fontsize=11)
    axes.set_facecolor("#f0f0f0")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _write_numbers(axes: Axes, schedule: Schedule, rows: Sequence[Sequence[Cell]], inches: float) -> None:
    """Write the micro-batch into every cell that is wide enough."""
    if sum(map(len, rows)) > _MOST_NUMBERS:
        return
    digits = len(str(schedule.micro_batches - 1))
    spans = sorted(cell.end - cell.start for row in rows for cell in row if cell.end > cell.start)
    typical = inches * spans[len(spans) // 4] if spans else 0.0
    size = min(10.0, max(6.0, 72 * 0.9 * typical / (0.62 * digits)))
    for stage, row in enumerate(rows):
        for cell in row:
            number = str(cell.action.micro_batch)
            if 72 * inches * (cell.end - cell.start) < 0.6 * size * len(number):
                continue
            colour = colour_of(cell.action.kind, cell.action.chunk, schedule.chunks)
            ink = "black" if is_light(colour) or not cell.reached else "white"
            middle = (cell.start + cell.end) / 2
            axes.text(middle, stage, number, fontsize=size, color=ink, ha="center", va="center_baseline")


def _stage_columns(axes: Axes, simulation: Simulation) -> None:
    def write(words: str, height: float, offset: int, *, of_axes: bool) -> None:
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "fontsize": 10}
        at = "axes fraction" if of_axes else axes.get_yaxis_transform()
        va = "baseline" if of_axes else "center_baseline"
        axes.annotate(words, (1, height), xycoords=at, xytext=(offset, 6 * of_axes), va=va, **style)

    write("idle", 1, 46, of_axes=True)
    write("peak", 1, 86, of_axes=True)
    for stage, (idle, peak) in enumerate(zip(simulation.idle, simulation.peak_activations, strict=True)):
        write(f"{100 * idle / simulation.cost:.1f}%", stage, 46, of_axes=False)
        write(f"{peak:.4g}", stage, 86, of_axes=False)


def _frame_problems(axes: Axes, rows: Sequence[Sequence[Cell]], problems: Sequence[ScheduleProblem]) -> None:
    """Frame every wrong action. A missing one is framed after the last action."""
    from matplotlib.patches import Rectangle

    ends = [row[-1].end if row else 0.0 for row in rows]
    for problem in problems:
        if problem.index is None:
            start = ends[problem.stage]
            end = ends[problem.stage] = start + 1
            axes.set_xlim(0, max(end, axes.get_xlim()[1]))
            style: dict[str, Any] = {"fontsize": 8, "color": _MARK, "ha": "center", "va": "center"}
            axes.text(start + 0.5, problem.stage, str(problem.action), **style)
        else:
            cell = rows[problem.stage][problem.index]
            start, end = cell.start, cell.end
        top = problem.stage - 0.44
        frame: dict[str, Any] = {"fill": False, "edgecolor": _MARK, "linewidth": 2.5, "clip_on": False}
        axes.add_patch(Rectangle((start, top), end - start, 0.88, zorder=5, **frame))
        middle = (start + end) / 2
        axes.plot(middle, top, marker="v", markersize=7, color=_MARK, zorder=6, clip_on=False)


def add_legend(figure: Figure, schedule: Schedule, *, is_complete: bool = True) -> None:
    """Add a legend of the colours of kinds and chunks below a figure."""
    from matplotlib.patches import Patch

    kinds, chunks = kinds_of(schedule), range(schedule.chunks)
    entries = [(kind, chunk) for kind in kinds for chunk in chunks]
    if len(entries) > 12:  # the shades of other chunks are between those of the first and the last one
        entries = [(kind, chunk) for kind in kinds for chunk in (0, chunks[-1])]
    patches = []
    for kind, chunk in entries:
        label = KINDS[kind] + (f", chunk {chunk}" if len(chunks) > 1 else "")
        patches.append(Patch(facecolor=rgb(colour_of(kind, chunk, len(chunks))), label=label))
    if not is_complete:
        patches.append(Patch(facecolor="white", edgecolor="#707070", linestyle=":", label="never reached"))
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 4), frameon=False)
