"""Schedules as grids of text, with a row for each stage and time to the right (see also `picture`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.pipeline.action import Action, Schedule
from hpctrain.report.cells import KINDS, Cell, arrange, colour_of, is_light, kinds_of, number_text, title
from hpctrain.report.terminal import fit

if TYPE_CHECKING:
    from hpctrain.pipeline.simulate import Simulation

_MOST_ROWS = 40
_GAP = " .. "


def text(schedule: Schedule, simulation: Simulation, color: bool, width: int) -> str:
    """Return a schedule as a grid with heading, time axis and legend.

    Each row ends with the idle time of the stage in percent of the cost, and its peak of activations in
    micro-batches of the whole stage. Cells show their micro-batch, without colour also their kind. In narrow
    grids only last digits are shown. If that is too wide, too, the middle is left out, with a note.

    Args:
        schedule: The schedule.
        simulation: Its simulation.
        color: True for colours of a terminal.
        width: Largest number of columns, if that is possible.
    """
    rows = arrange(schedule, simulation)
    left = len(str(schedule.stage_count - 1)) + 1
    right = 12
    labels = [[_cell_label(schedule, cell.action, color) for cell in row] for row in rows]
    ruler = _Ruler.fit(rows, max(width - left - right, 20), labels)
    cost, ideal = number_text(simulation.cost), number_text(simulation.ideal)
    heading = f"{title(schedule)}: bubble {100 * simulation.bubble_rate:.2f}% (cost {cost}, ideal {ideal})"
    lines = [*fit(heading, width), "", f"stage{' idle  peak':>{left + ruler.width + right - 5}}"]
    for stage in range(schedule.stage_count):
        shown = _MOST_ROWS // 2
        if schedule.stage_count > _MOST_ROWS and shown <= stage < schedule.stage_count - shown:
            if stage == shown:
                lines.append(f"{':':>{left - 1}}")
            continue
        bubble, peak = simulation.idle[stage] / simulation.cost, simulation.peak_activations[stage]
        cells = ruler.row(schedule, rows[stage], color)
        lines.append(f"{stage:>{left - 1}} {cells}{100 * bubble:>5.1f}%{f'{peak:.4g}':>6}")
    lines.append(f"{'':{left}}{ruler.ticks()} time")
    notes = []
    if len(ruler.windows) > 1:
        (_, first), (last, _) = ruler.windows
        notes.append(f"time {number_text(ruler.time(first))} to {number_text(ruler.time(last))}")
    if schedule.stage_count > _MOST_ROWS:
        notes.append(f"{schedule.stage_count - 2 * (_MOST_ROWS // 2)} stages")
    if notes:
        lines += fit(f"Not shown: {' and '.join(notes)}; --png FILE draws the whole schedule.", width)
    return "\n".join([*lines, "", *_legend(schedule, color, ruler.last_digit, width)])


def _cell_label(schedule: Schedule, action: Action, color: bool) -> str:
    if color:
        return str(action.micro_batch)
    if schedule.chunks == 2:  # `f3` for F3.1: four letters a cell would be too wide for most terminals
        return f"{action.kind.lower() if action.chunk else action.kind}{action.micro_batch}"
    return str(action)


@dataclass(frozen=True, slots=True)
class _Ruler:
    """Mapping from times to columns of text.

    Attributes:
        scale: Columns per unit of time.
        windows: First and last columns of the parts that are shown.
        last_digit: True if only the last digits of micro-batches fit.
    """

    scale: float
    windows: tuple[tuple[int, int], ...]
    last_digit: bool

    @staticmethod
    def fit(rows: Sequence[Sequence[Cell]], available: int, labels: Sequence[Sequence[str]]) -> _Ruler:
        """Return a mapping with the most legible width that fits.

        Args:
            rows: Cells of each stage.
            available: Number of columns.
            labels: Text of each cell.
        """
        spans = [cell.end - cell.start for row in rows for cell in row]
        total = max((cell.end for row in rows for cell in row), default=0.0)
        # Cells that are far shorter than the others may have no label. Otherwise the grid would be too wide.
        longest = max(spans, default=0.0)
        short = min((span for span in spans if span > 0 and span >= longest / 4), default=1.0)
        letters = max((len(label) for row in labels for label in row), default=1)
        numbers_only = all(label.isdecimal() for row in labels for label in row)
        least = letters + (numbers_only and letters > 1)  # 10 and 11 without a gap would look like 1011
        most = letters + (2 if numbers_only else 1)
        wide = available * short / total if total else most
        cramped = numbers_only and 1 <= wide < least
        wide = min(wide, most) if cramped else min(max(wide, least), most)
        edges = (edge / short for row in rows for cell in row for edge in (cell.start, cell.end))
        if all(abs(edge - round(edge)) < 1e-6 for edge in edges):
            wide = math.floor(wide + 1e-9)
        scale = wide / short
        columns = max(round(total * scale), 1)
        if columns <= available:
            return _Ruler(scale, ((0, columns),), cramped)
        step = max(round(wide), 1)
        first, last = ((available - len(_GAP)) * share // 5 // step * step for share in (3, 2))
        return _Ruler(scale, ((0, first), (columns - last, columns)), last_digit=False)

    @property
    def width(self) -> int:
        return sum(end - start for start, end in self.windows) + len(_GAP) * (len(self.windows) - 1)

    def time(self, column: int) -> float:
        return column / self.scale

    def row(self, schedule: Schedule, cells: Sequence[Cell], color: bool) -> str:
        return _GAP.join("".join(self._window(schedule, cells, color, window)) for window in self.windows)

    def _window(
        self, schedule: Schedule, cells: Sequence[Cell], color: bool, window: tuple[int, int]
    ) -> Iterator[str]:
        column, window_end = window
        for cell in cells:
            start, end = round(cell.start * self.scale), round(cell.end * self.scale)
            shown_start, shown_end = max(start, column), min(end, window_end)
            if shown_start >= shown_end:
                continue
            yield " " * (shown_start - column)
            label, available = _cell_label(schedule, cell.action, color), shown_end - shown_start
            label = label[-1:] if self.last_digit else label
            label = label if len(label) <= available and start >= window[0] else ""
            if color:
                background = colour_of(cell.action.kind, cell.action.chunk, schedule.chunks)
                yield _paint(label.center(available), background)
            else:
                label = label or cell.action.kind[: start >= window[0]]
                yield label + "-" * (available - len(label) - 1) + " " * (available > len(label))
            column = shown_end
        yield " " * (window_end - column)

    def ticks(self) -> str:
        longest = len(number_text(self.time(self.windows[-1][1])))
        step = _round_step((longest + 4) / self.scale)
        parts = []
        for window_start, window_end in self.windows:
            part = ""
            for count in range(
                math.ceil(window_start / self.scale / step), 1 + math.floor(window_end / self.scale / step)
            ):
                label, column = number_text(count * step), round(count * step * self.scale) - window_start
                if column + len(label) <= window_end - window_start:
                    part = part.ljust(column) + label
            parts.append(part.ljust(window_end - window_start))
        return _GAP.join(parts)


def _legend(schedule: Schedule, color: bool, last_digit: bool, width: int) -> list[str]:
    kinds, chunks = kinds_of(schedule), range(schedule.chunks)
    if not color:
        entries = [f"{kind} {KINDS[kind]}" for kind in kinds]
        if schedule.chunks == 2:
            entries.append("small letters: chunk 1")
        return fit(", ".join([*entries, "with the number of the micro-batch"]), width)
    # Texts with the columns that they take, which escape codes do not.
    shown = [
        (
            "".join(_paint("  ", colour_of(kind, chunk, schedule.chunks)) for chunk in chunks)
            + f" {KINDS[kind]}",
            2 * len(chunks) + 1 + len(KINDS[kind]),
        )
        for kind in kinds
    ]
    texts = ["darkest: chunk 0"] if len(chunks) > 1 else []
    texts.append("numbers: micro-batches" + (", the last digit" if last_digit else ""))
    lines, used = [""], 0
    for text, size in [*shown, *((text, len(text)) for text in texts)]:
        if used and used + 3 + size > width:
            lines, used = [*lines, ""], 0
        lines[-1] += ("   " if used else "") + text
        used += (3 if used else 0) + size
    return lines


def _paint(label: str, colour: tuple[float, float, float]) -> str:
    red, green, blue = map(round, colour)
    background, ink = 16 + 36 * red + 6 * green + blue, 16 if is_light(colour) else 231
    return f"\x1b[48;5;{background};38;5;{ink}m{label}\x1b[0m"


def _round_step(least: float) -> float:
    """Return the smallest number from `least` on that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
