"""The pipeline schedule that a deck asks for: one by name, or one that a user wrote into a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from hpctrain.deck.schedules import SCHEDULE_NAMES, V_SHAPED
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.files import read_text
from hpctrain.pipeline.action import Action, Placement, Schedule, accumulation, stage_lines
from hpctrain.pipeline.check import check, refusal
from hpctrain.pipeline.generate import generate
from hpctrain.pipeline.simulate import StageTimes
from hpctrain.text import either, nearest

SCHEDULE_BYTES = 64 << 20  # of a schedule's file at most


def outline(deck: Deck) -> Schedule:
    """The stages, chunks and placement of a deck's schedule, which are known before any times are."""
    layout = deck.layout
    forward = tuple(Action("F", 0, chunk) for chunk in range(layout.chunks))
    placement: Placement = "v" if layout.schedule in V_SHAPED else "loop"
    if layout.schedule not in SCHEDULE_NAMES:
        placement = schedule_of_file(deck).placement
    return Schedule((forward,) * layout.pipeline, "outline", placement)


def make_schedule(deck: Deck, data_ranks: int, times: StageTimes | None = None) -> Callable[[int], Schedule]:
    """The deck's schedule as a function of the number of micro-batches.

    `times`, the same on all ranks, are for schedules that are searched for (default: all alike).

    HpctrainError, the same on all ranks, where the schedule cannot be had for the deck's batch (or for the
    batches of its ramp), or where a file's schedule is wrong or would deadlock.
    """
    layout, batch = deck.layout, deck.batch
    at_once = batch.micro_size * data_ranks
    if layout.pipeline == 1:
        if layout.schedule not in SCHEDULE_NAMES:
            schedule_of_file(deck)  # a slip is one on a single stage too
        return accumulation
    if layout.schedule not in SCHEDULE_NAMES:
        schedule = _from_file(deck, batch.global_size // at_once)
        return lambda _: schedule

    @lru_cache(maxsize=64)
    def by_name(micro_batches: int) -> Schedule:
        chunks = layout.chunks if layout.schedule == "interleaved" else None
        return generate(layout.schedule, layout.pipeline, micro_batches, chunks, times)

    sizes = {batch.global_size, *((batch.ramp_from,) if batch.ramp_from else ())}
    for size in sorted(sizes):
        try:
            by_name(-(-size // at_once))
        except HpctrainError as error:
            reasons = [problem.removeprefix(f"{layout.schedule}: ") for problem in error.problems]
            raise HpctrainError([deck.problem("layout.schedule", each) for each in reasons]) from None
    return by_name


def schedule_of_file(deck: Deck) -> Schedule:
    """The schedule in the deck's file; HpctrainError where there is none to be read."""
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
    """Read and check a schedule file; its numbers must be those of the deck."""
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
        deck.problem("layout.schedule", f"has {there} {what}, expected {name} = {wanted}")
        for what, (there, name, wanted) in numbers.items()
        if there != wanted
    ]
    if deck.batch.ramp_from:
        differing.append(
            deck.problem(
                "layout.schedule",
                "conflicts with batch.ramp_from: a schedule file has a fixed number of micro-batches",
            )
        )
    if differing:
        raise HpctrainError(differing)
    problems = check(schedule)
    if problems:
        raise refusal(problems, str(path), stage_lines(text))
    return schedule
