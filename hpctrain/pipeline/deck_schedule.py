"""The pipeline schedule that a deck specifies, by name or by the path of a file that a user wrote."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from hpctrain.deck.schedules import SCHEDULE_NAMES, V_SHAPED
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.files import read_text
from hpctrain.pipeline.action import Action, Placement, Schedule, accumulation, stage_lines
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.schedule_check import check_schedule, schedule_error
from hpctrain.pipeline.simulate import StageTimes
from hpctrain.text import either, nearest

SCHEDULE_BYTES = 64 << 20  # largest size of a schedule file


def outline_schedule(deck: Deck) -> Schedule:
    """Return a schedule with the stages, chunks and placement of the deck's schedule.

    It contains only F of micro-batch 0, and is for code that needs to know where parts are before times are
    known.
    """
    layout = deck.layout
    forward = tuple(Action("F", 0, chunk) for chunk in range(layout.chunks))
    placement: Placement = "v" if layout.schedule in V_SHAPED else "loop"
    if layout.schedule not in SCHEDULE_NAMES:
        placement = read_schedule_file(deck).placement
    return Schedule((forward,) * layout.pipeline, "outline", placement)


def schedule_builder(
    deck: Deck, data_ranks: int, times: StageTimes | None = None
) -> Callable[[int], Schedule]:
    """Return a function that builds the deck's schedule for a number of micro-batches.

    A schedule from a file is returned whatever the number.

    Args:
        deck: The deck.
        data_ranks: Number of data-parallel ranks.
        times: Times for schedules that are searched for, the same on all ranks; by default all passes are
            equally long.

    Raises:
        HpctrainError: The schedule is impossible for the deck's batch or for those of its ramp, or the
            schedule in a file is wrong or would deadlock. All ranks raise the same error.
    """
    layout, batch = deck.layout, deck.batch
    rows_per_pass = batch.micro_size * data_ranks
    if layout.pipeline == 1:
        if layout.schedule not in SCHEDULE_NAMES:
            read_schedule_file(deck)  # report errors in the file even if there is a single stage
        return accumulation
    if layout.schedule not in SCHEDULE_NAMES:
        schedule = _from_file(deck, batch.global_size // rows_per_pass)
        return lambda _: schedule

    @lru_cache(maxsize=64)
    def build(micro_batches: int) -> Schedule:
        chunks = layout.chunks if layout.schedule == "interleaved" else None
        return generate_schedule(layout.schedule, layout.pipeline, micro_batches, chunks, times)

    sizes = {batch.global_size, *((batch.ramp_from,) if batch.ramp_from else ())}
    for size in sorted(sizes):
        try:
            build(-(-size // rows_per_pass))
        except HpctrainError as error:
            reasons = [problem.removeprefix(f"{layout.schedule}: ") for problem in error.problems]
            raise HpctrainError([deck.problem("layout.schedule", each) for each in reasons]) from None
    return build


def read_schedule_file(deck: Deck) -> Schedule:
    """Return the schedule in the file that the deck names.

    Raises:
        HpctrainError: The file cannot be read or is not a schedule.
    """
    return Schedule.parse(_text(deck), deck.layout.schedule)


def _text(deck: Deck) -> str:
    try:
        return read_text(deck.layout.schedule, SCHEDULE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not text" if isinstance(error, ValueError) else (error.strerror or str(error)).lower()
        near = nearest(deck.layout.schedule, SCHEDULE_NAMES)
        hint = f' (did you mean "{near}"?)' if near else ""
        sentence = f"must be {either(SCHEDULE_NAMES)}, or the path of a schedule file ({reason}){hint}"
        raise HpctrainError(deck.problem("layout.schedule", sentence)) from None


def _from_file(deck: Deck, micro_batches: int) -> Schedule:
    """Return the schedule of a file, after checking it and comparing its counts with those of the deck."""
    path, layout = Path(deck.layout.schedule), deck.layout
    text = _text(deck)
    schedule = Schedule.parse(text, str(path))
    share = "batch.global_size / (batch.micro_size x data ranks)"
    numbers = {
        "stages": (schedule.stage_count, "layout.pipeline", layout.pipeline),
        "chunks": (schedule.chunks, "layout.chunks", layout.chunks),
        "micro-batches": (schedule.micro_batches, share, micro_batches),
    }
    differing = [
        deck.problem("layout.schedule", f"has {actual} {what}, expected {name} = {expected}")
        for what, (actual, name, expected) in numbers.items()
        if actual != expected
    ]
    if deck.batch.ramp_from:
        sentence = "conflicts with batch.ramp_from: a schedule file has a fixed number of micro-batches"
        differing.append(deck.problem("layout.schedule", sentence))
    if differing:
        raise HpctrainError(differing)
    problems = check_schedule(schedule)
    if problems:
        raise schedule_error(problems, str(path), stage_lines(text))
    return schedule
