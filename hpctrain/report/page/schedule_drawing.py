"""Drawing of the schedule of a pipeline in a page, as it ran and as simulated; balance of its stages."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.pipeline.action import Kind
from hpctrain.pipeline.simulate import Simulation, simulate
from hpctrain.report.cells import KINDS, Cell, arrange, colour_of, is_light, kinds_of, rgb, title
from hpctrain.report.page.markup import cell, note, table, text
from hpctrain.report.recorded import RecordedStep
from hpctrain.text import counted
from hpctrain.units import format_seconds

CELLS = 12_000
"""Largest number of cells that are drawn."""

NUMBERS = 2500
"""Largest number of cells with the numbers of their micro-batches."""

STAGES = 256

_LEFT, _ROW = 40.0, 22.0
_NARROWEST, _WIDEST, _CELL = 1160.0, 8000.0, 12.0
"""Smallest and largest width of a drawing, and width of a cell of the longest row."""

_LETTER = 7.0


def schedule_of(step: RecordedStep) -> str:
    """Return both drawings with their bubbles, and a table of stages; a sentence if they are too large."""
    schedule = step.schedule
    if schedule.stage_count > STAGES or sum(map(len, schedule.stages)) > CELLS:
        return note(
            f"{title(schedule)}: too large to be drawn here; `hpctrain plot` draws it into a file of its own"
        )
    measured, simulated = step.measured(), simulate(schedule, step.times())
    drawings = [f"<p>{text(title(schedule))}; the numbers are micro-batches.</p>", f"<p>{_colours(step)}</p>"]
    total = max(measured.finish, simulated.finish) or 1.0
    for heading, result in (
        (f"measured, step {step.step}", measured),
        ("simulated from the measured mean times", simulated),
    ):
        figures = f"bubble {100 * result.bubble_rate:.1f}%, cost {format_seconds(result.cost)}"
        drawings.append(
            f"<h4>{text(heading)}: {figures}, ideal {format_seconds(result.ideal)}</h4>"
            f'<div class="wide full" tabindex="0">{_drawing(step, result, total, heading)}</div>'
        )
    return "".join([*drawings, _balance(step, measured, simulated)])


def _drawing(step: RecordedStep, result: Simulation, total: float, heading: str) -> str:
    """Return a drawing with a row per stage and a box per action. Boxes of a kind and chunk are one path."""
    schedule = step.schedule
    rows = arrange(schedule, result)
    width = min(_WIDEST, max(_NARROWEST, _CELL * max(map(len, rows), default=0)))
    scale = (width - _LEFT - 8) / total
    boxes: dict[tuple[Kind, int], list[str]] = {}
    letters: list[str] = []
    writes = sum(map(len, rows)) <= NUMBERS
    for stage, row in enumerate(rows):
        top = stage * _ROW + 2
        for each in row:
            left, right = _LEFT + scale * each.start, _LEFT + scale * each.end
            path = f"M{left:.1f} {top:g}H{right:.1f}v{_ROW - 4:g}H{left:.1f}Z"
            boxes.setdefault((each.action.kind, each.action.chunk), []).append(path)
            if writes:
                letters += _number(each, left, right, top, schedule.chunks)
    height = len(rows) * _ROW
    parts = [f'<rect class="idle" x="{_LEFT:g}" y="0" width="{width - _LEFT:g}" height="{height:g}"/>']
    parts += [
        f'<path fill="{_colour(kind, chunk, schedule.chunks)}" stroke="#fff" stroke-width=".6" '
        f'd="{"".join(paths)}"/>'
        for (kind, chunk), paths in boxes.items()
    ]
    parts += [
        f'<text class="left" x="{_LEFT - 8:g}" y="{stage * _ROW + 15:g}">{stage}</text>'
        for stage in range(len(rows))
    ]
    ends = (
        f'<text x="{_LEFT:g}" y="{height + 14:g}">0</text>'
        f'<text class="end" x="{width - 8:g}" y="{height + 14:g}">{format_seconds(total)}</text>'
        f'<text class="left" x="{_LEFT - 8:g}" y="{height + 14:g}">stage</text>'
    )
    return (
        f'<svg class="schedule" width="{width:g}" viewBox="0 0 {width:g} {height + 20:g}" role="img" '
        f'aria-label="{text(heading)}">{"".join(parts)}{"".join(letters)}{ends}</svg>'
    )


def _number(each: Cell, left: float, right: float, top: float, chunks: int) -> Iterator[str]:
    number = str(each.action.micro_batch)
    if right - left >= _LETTER * len(number) + 2:
        ink = "#000" if is_light(colour_of(each.action.kind, each.action.chunk, chunks)) else "#fff"
        yield (
            f'<text x="{(left + right) / 2:.1f}" y="{top + 13:g}" text-anchor="middle" font-size="11" '
            f'class="number {"dark" if ink == "#000" else "bright"}">{number}</text>'
        )


def _colour(kind: Kind, chunk: int, chunks: int) -> str:
    return "#" + "".join(f"{round(255 * share):02x}" for share in rgb(colour_of(kind, chunk, chunks)))


def _colours(step: RecordedStep) -> str:
    """Return a legend of colours, for the first and the last of several chunks."""
    chunks = step.schedule.chunks
    shown = [0, chunks - 1] if chunks > 1 else [0]
    return " &nbsp; ".join(
        f'<svg width="14" height="12" aria-hidden="true"><rect width="14" height="12" rx="2" '
        f'fill="{_colour(kind, chunk, chunks)}"/></svg> '
        + text(KINDS[kind] + (f", chunk {chunk}" if chunks > 1 else ""))
        for kind in kinds_of(step.schedule)
        for chunk in shown
    )


def _balance(step: RecordedStep, measured: Simulation, simulated: Simulation) -> str:
    """Return a table of the work and the waiting time of each stage in the measured step."""
    work = [
        sum(end - start for start, end in zip(starts, ends, strict=True))
        for starts, ends in zip(step.start, step.end, strict=True)
    ]
    mean = sum(work) / len(work) if work else 0.0
    rows = []
    for stage, busy in enumerate(work):
        bubble, messages = step.waits(stage)
        rows.append(
            [
                cell(f"stage {stage}", "text", head=True),
                cell(format_seconds(busy)),
                cell(f"{100 * (busy / mean - 1):+.1f}%" if mean else ""),
                cell(f"{100 * measured.idle[stage] / measured.cost:.1f}%" if measured.cost else ""),
                cell(f"{100 * simulated.idle[stage] / simulated.cost:.1f}%" if simulated.cost else ""),
                cell(format_seconds(bubble)),
                cell(format_seconds(messages)),
                cell(f"{measured.peak_activations[stage]:.4g}"),
            ]
        )
    head = (
        *("", "work", "than the mean", "idle", "idle, simulated", "waits for others"),
        *("waits for messages", "most micro-batches held"),
    )
    return f"<h4>Balance of {counted(len(work), 'stage')}</h4>" + table(head, rows)
