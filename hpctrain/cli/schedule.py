"""`hpctrain schedule NAME|FILE`: draw, simulate and check a pipeline schedule."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.shared_options import PATH
from hpctrain.errors import HpctrainError, failing_as
from hpctrain.files import read_text
from hpctrain.text import nearest

if TYPE_CHECKING:
    from hpctrain.pipeline.action import Schedule
    from hpctrain.pipeline.simulate import Simulation

COLUMNS_OF_A_FILE = 240
"""Width of a grid that is not printed on a terminal."""

MAX_PROBLEMS = 10
"""Largest number of problems of a schedule that are listed."""


@dataclass(frozen=True)
class ScheduleRequest:
    """Schedule that the user wants to see.

    Attributes:
        source: Name of a schedule, or its file.
        stages: Number of stages; None to take that of the file.
        microbatches: Number of micro-batches; None to take that of the file.
        chunks: Number of chunks; None for the default, or for that of the file.
        times: Times of a stage for one micro-batch: F, B, W and C.
        memory_limit: Largest number of activations that a stage may hold; None for no limit.
        png: File for a picture; None for no picture.
    """

    source: str
    stages: int | None
    microbatches: int | None
    chunks: int | None
    times: tuple[float, ...]
    memory_limit: float | None
    png: Path | None


def read_times(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    """Parse four numbers with commas, such as `1,1,1,0`. Raises click.BadParameter for anything else."""
    try:
        numbers = tuple(map(float, value.split(",")))
    except ValueError:
        numbers = ()
    if len(numbers) != 4:
        raise click.BadParameter(f"{value!r}: must be four numbers F,B,W,C, such as 1,1,1,0.1", ctx, param)
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise click.BadParameter(f"{value!r}: all numbers must be 0 or more", ctx, param)
    if not any(numbers[:3]):
        raise click.BadParameter(f"{value!r}: at least one of F, B and W must be above 0", ctx, param)
    return numbers


@click.command(name="schedule")
@click.argument("source", metavar="NAME|FILE")
@click.option("--stages", metavar="P", type=click.IntRange(1, 4096), help="Number of pipeline stages.")
@click.option(
    "--microbatches", metavar="M", type=click.IntRange(1, 65536), help="Number of micro-batches per step."
)
@click.option("--chunks", metavar="V", type=click.IntRange(1, 256), help="Number of model chunks per stage.")
@click.option(
    "--times",
    metavar="F,B,W,C",
    callback=read_times,
    default="1,1,1,0",
    show_default=True,
    help="Times of a stage for one micro-batch: forward, input gradient, weight gradient (a full backward "
    "takes both), and sending the result to the next stage.",
)
@click.option(
    "--memory-limit",
    metavar="X",
    type=click.FloatRange(0, min_open=True),
    help="Largest number of micro-batches whose activations a stage may hold.",
)
@click.option("--png", metavar="FILE", type=PATH, help="Also draw the schedule as a PNG file.")
@click.option(
    "--text",
    "as_text",
    is_flag=True,
    help="Print the schedule as text that can be edited and used in a deck.",
)
@click.option("--json", "as_json", is_flag=True, help="Print cost, bubble and peak activations as JSON.")
def command(as_text: bool, as_json: bool, **values: Any) -> None:
    """Print a pipeline schedule as a grid, with its bubble and its peak activations.

    NAME is naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, v-min or dualpipe-v, and requires
    --stages and --microbatches. FILE is a schedule in the format of --text. Errors in it are listed, and with
    --png they are marked in the picture.
    """
    from hpctrain.pipeline.simulate import StageTimes, simulate
    from hpctrain.report import grid, picture
    from hpctrain.report.terminal import coloured, columns

    if as_text and as_json:
        raise click.UsageError("--text conflicts with --json")
    request = ScheduleRequest(**values)
    schedule, png = find_schedule(request), request.png
    simulation = simulate(schedule, StageTimes(*request.times))
    named = with_name(schedule, Path(request.source))
    if png is not None:
        picture.png(named, simulation, png)
    if as_text:
        click.echo(str(schedule))
    elif as_json:
        click.echo(json.dumps(summary(named, simulation)))
    else:
        color, width = coloured(), columns() or COLUMNS_OF_A_FILE
        click.echo(grid.text(named, simulation, color, width), color=color)
        if png is not None:
            click.echo(png)


def summary(schedule: Schedule, simulation: Simulation) -> dict[str, object]:
    """Return the object that `--json` prints."""
    return {
        "schedule": schedule.name,
        "stages": schedule.stage_count,
        "microbatches": schedule.micro_batches,
        "chunks": schedule.chunks,
        "cost": simulation.cost,
        "ideal": simulation.ideal,
        "bubble_rate": simulation.bubble_rate,
        "peak_activations": list(simulation.peak_activations),
    }


def find_schedule(request: ScheduleRequest) -> Schedule:
    """Generate a schedule by its name, or read and check one from a file.

    Raises:
        HpctrainError: There is no such schedule, a number is missing, or the schedule is not valid.
    """
    from hpctrain.deck.schedules import SCHEDULE_NAMES
    from hpctrain.pipeline.generate import generate_schedule
    from hpctrain.pipeline.simulate import StageTimes

    source, stages, microbatches = request.source, request.stages, request.microbatches
    if source in SCHEDULE_NAMES:
        if stages is None or microbatches is None:
            missing = ["--stages P"] * (stages is None) + ["--microbatches M"] * (microbatches is None)
            raise HpctrainError(f"schedule {source} requires {' and '.join(missing)}")
        times = StageTimes(*request.times)
        return generate_schedule(source, stages, microbatches, request.chunks, times, request.memory_limit)
    if not Path(source).exists():
        name = nearest(source, SCHEDULE_NAMES)
        hint = f'did you mean "{name}"?' if name else f"the names are {', '.join(SCHEDULE_NAMES)}"
        raise HpctrainError(f'"{source}" is neither a schedule nor a file: {hint}')
    return read_schedule(request)


def read_schedule(request: ScheduleRequest) -> Schedule:
    """Read a schedule from a file and check it. If it is not valid, a picture marks its problems.

    Raises:
        HpctrainError: The file cannot be read, has other numbers, or is not a valid schedule.
    """
    from hpctrain.pipeline.action import Schedule, stage_lines
    from hpctrain.pipeline.deck_schedule import SCHEDULE_BYTES
    from hpctrain.pipeline.schedule_check import check_schedule, schedule_error
    from hpctrain.report import picture

    path = Path(request.source)
    try:
        with failing_as(f"{path}: cannot be read"):
            text = read_text(path, SCHEDULE_BYTES)
    except UnicodeDecodeError as error:
        raise HpctrainError(f"{path}: is not text; a schedule has the format of --text") from error
    schedule = Schedule.parse(text, str(path))
    numbers = {
        "--stages": (request.stages, schedule.stage_count),
        "--microbatches": (request.microbatches, schedule.micro_batches),
        "--chunks": (request.chunks, schedule.chunks),
    }
    conflicts = [
        f"{path}: {option} {expected} conflicts with the file, which has {number}"
        for option, (expected, number) in numbers.items()
        if expected is not None and expected != number
    ]
    if conflicts:
        raise HpctrainError(conflicts)
    problems = check_schedule(schedule, request.memory_limit)
    if problems:
        sentences = list(schedule_error(problems[:MAX_PROBLEMS], str(path), stage_lines(text)).problems)
        if len(problems) > MAX_PROBLEMS:
            sentences.append(f"{path}: and {len(problems) - MAX_PROBLEMS} more")
        if request.png is not None:
            picture.png(with_name(schedule, path), None, request.png, problems)
            sentences.append(f"see {request.png} for the locations")
        raise HpctrainError(sentences)
    return schedule


def with_name(schedule: Schedule, path: Path) -> Schedule:
    """Return the schedule, named after its file if it has no name."""
    return schedule if schedule.name else replace(schedule, name=" ".join(path.name.split()))
