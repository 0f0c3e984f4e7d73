"""Cells of the grids that show schedules, and their colours.

Colour-blind readers can distinguish the colours. Later chunks are lighter, as in the papers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.pipeline.action import Action, Kind, Schedule
from hpctrain.pipeline.simulate import Simulation, StageTimes, simulate_until_blocked
from hpctrain.text import counted

KINDS: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

# The first and the last chunk, as red, green, blue in the 6 x 6 x 6 colours that every terminal has.
_SHADES = {
    "F": ((0, 1, 3), (2, 3, 4)),
    "B": ((0, 2, 1), (2, 4, 2)),
    "I": ((0, 3, 3), (3, 5, 5)),
    "W": ((5, 2, 0), (5, 4, 2)),
}
_LEVELS = (0, 95, 135, 175, 215, 255)


@dataclass(frozen=True, slots=True)
class Cell:
    """Action with its start and end.

    Attributes:
        action: The action.
        start: Its start.
        end: Its end.
        reached: False if its data never arrive, so that it cannot run.
    """

    action: Action
    start: float
    end: float
    reached: bool = True


def arrange(schedule: Schedule, simulation: Simulation | None) -> list[list[Cell]]:
    """Return the cells of every stage.

    Times are those of the simulation. For a schedule that cannot run, F, I and W take one unit and B two, and
    actions whose data never arrive follow all others.

    Args:
        schedule: The schedule.
        simulation: Its simulation; None if it cannot run.
    """
    unit = float(schedule.chunks)
    times = (
        (simulation.start, simulation.end)
        if simulation
        else simulate_until_blocked(schedule, StageTimes(unit, unit, unit))
    )
    rows = [list(map(Cell, *row)) for row in zip(schedule.stages, *times, strict=True)]
    last = max((row[-1].end for row in rows if row), default=0.0)
    for row, actions in zip(rows, schedule.stages, strict=True):
        for number, action in enumerate(actions[len(row) :], 1):
            row.append(Cell(action, last + number, last + number + 1, reached=False))
    return rows


def title(schedule: Schedule) -> str:
    """Return a title such as `1f1b, 4 stages, 8 micro-batches`, with the chunks if there are several."""
    counts = [(schedule.stage_count, "stage"), (schedule.micro_batches, "micro-batch")]
    counts += [(schedule.chunks, "chunk")] if schedule.chunks > 1 else []
    return ", ".join([schedule.name or "schedule", *(counted(*each) for each in counts)])


def colour_of(kind: Kind, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return levels 0 to 5 of red, green and blue for a kind and chunk."""
    share = chunk / (chunks - 1) if chunks > 1 else 0.0
    red, green, blue = (first + share * (last - first) for first, last in zip(*_SHADES[kind], strict=True))
    return red, green, blue


def is_light(colour: tuple[float, float, float]) -> bool:
    """Return True if black letters are more legible on a colour than white ones."""
    red, green, blue = colour
    return 0.3 * red + 0.59 * green + 0.11 * blue > 2


def kinds_of(schedule: Schedule) -> list[Kind]:
    """Return the kinds that a schedule has, in the order of KINDS."""
    used = {action.kind for stage in schedule.stages for action in stage}
    return [kind for kind in KINDS if kind in used]


def number_text(value: float) -> str:
    """Return a time as text, without superfluous digits."""
    return f"{value:.6g}"


def rgb(colour: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return a colour of levels as red, green and blue from 0 to 1."""
    red, green, blue = (
        (_LEVELS[int(level)] * (1 - level % 1) + _LEVELS[math.ceil(level)] * (level % 1)) / 255
        for level in colour
    )
    return red, green, blue
