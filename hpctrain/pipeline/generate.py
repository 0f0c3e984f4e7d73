"""Schedules by name, and the plain ones among them.

All of them do the backwards of a chunk in the order of the micro-batches, weight gradients too, so that
gradients add up in the same order, and to the same bits, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hpctrain.deck.schedules import SCHEDULE_NAMES
from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Action, Kind, Schedule
from hpctrain.pipeline.dual_pipe import dual_pipe_v
from hpctrain.pipeline.simulate import StageTimes, peak_activations
from hpctrain.pipeline.v_schedule import LIMITS, search
from hpctrain.pipeline.zero_bubble import zb_h1, zb_h2
from hpctrain.text import either, nearest

MOST_STAGES, MOST_MICRO_BATCHES, MOST_CHUNKS = 10_000, 1_000_000, 1_000  # what the text form can say
MOST_WORK = 10_000_000


def naive(stages: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time through all stages and back."""
    actions = tuple(Action(kind, index) for index in range(micro_batches) for kind in _FORWARD_BACKWARD)
    return Schedule((actions,) * stages, "naive")


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang and others, GPipe, arXiv 1811.06965)."""
    actions = tuple(Action(kind, index) for kind in _FORWARD_BACKWARD for index in range(micro_batches))
    return Schedule((actions,) * stages, "gpipe")


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """A backward as soon as there is one (PipeDream-Flush: Narayanan and others, arXiv 2006.09503).

    As quick as GPipe, but a stage holds the activations of at most `stages - stage` micro-batches.
    """
    forwards, backwards = (
        [Action(kind, index) for index in range(micro_batches)] for kind in _FORWARD_BACKWARD
    )
    orders = (_in_turn(forwards, backwards, warm_up=stages - stage - 1) for stage in range(stages))
    return Schedule(tuple(orders), "1f1b")


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B over several chunks a stage (Narayanan and others, Megatron-LM, arXiv 2104.04473).

    Micro-batches go in rounds of `stages` through all chunks, so that a gap lasts for a chunk, not for a
    stage. `micro_batches` is to be a multiple of `stages`.
    """
    rounds = range(0, micro_batches, stages)
    up, down = range(chunks), range(chunks)[::-1]
    forwards = [Action("F", r + i, chunk) for r in rounds for chunk in up for i in range(stages)]
    backwards = [Action("B", r + i, chunk) for r in rounds for chunk in down for i in range(stages)]
    warm_ups = (2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages))
    return Schedule(tuple(_in_turn(forwards, backwards, each) for each in warm_ups), "interleaved")


_FORWARD_BACKWARD: tuple[Kind, Kind] = ("F", "B")


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, one forward and one backward in turn, and the backwards that are left."""
    left = forwards[warm_up:]
    pairs = (each for pair in zip(left, backwards, strict=False) for each in pair)
    return (*forwards[:warm_up], *pairs, *backwards[len(left) :])


# One chunk a stage.
PLAIN: Mapping[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}
SEARCHED = frozenset(LIMITS)  # with given times, within a limit of activations


def generate(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int | None = None,
    times: StageTimes | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """The schedule called `name`, one of `SCHEDULE_NAMES`, for a pipeline of `stages`.

    `chunks` is for "interleaved" (default 2); all others know theirs. Schedules that are searched for use
    `times` (default: all alike, nothing for communication). `memory_limit` is how many micro-batches'
    activations a stage may hold, see `peak_activations`; what is not searched for either keeps to it or
    is refused. Raises HpctrainError for an unknown name, and for numbers that the schedule cannot have.
    """
    problems = _mistakes(name, stages, micro_batches, chunks)
    if problems:
        raise HpctrainError(problems)
    if name in PLAIN:
        schedule = PLAIN[name](stages, micro_batches)
    elif name == "interleaved":
        schedule = interleaved(stages, micro_batches, 2 if chunks is None else chunks)
    elif name in SEARCHED:
        schedule = search(name, stages, micro_batches, times or StageTimes(), memory_limit)
    else:
        schedule = dual_pipe_v(stages, micro_batches)
    if memory_limit is not None:
        peaks = peak_activations(schedule)
        most = max(peaks)
        if most > memory_limit:
            raise HpctrainError(
                f"{name}: stage {peaks.index(most)} holds activations of {most:g} micro-batches; "
                f"the limit is {memory_limit:g}"
            )
    return schedule


def _mistakes(name: str, stages: int, micro_batches: int, chunks: int | None) -> list[str]:
    if name not in SCHEDULE_NAMES:
        near = nearest(name.lower(), SCHEDULE_NAMES)
        hint = f"did you mean {near!r}?" if near else f"use {either(SCHEDULE_NAMES)}"
        return [f"unknown schedule {name!r} ({hint})"]
    problems = [
        f"{name}: {what} = {number}: must be from 1 to {most}"
        for what, number, most in (
            ("stages", stages, MOST_STAGES),
            ("micro-batches", micro_batches, MOST_MICRO_BATCHES),
            ("chunks", 1 if chunks is None else chunks, MOST_CHUNKS),
        )
        if not 1 <= number <= most
    ]
    if not problems and stages * micro_batches * (chunks or 1) > MOST_WORK:
        problems.append(
            f"{name}: {stages} stages with {micro_batches} micro-batches exceed the limit: "
            f"stages x micro-batches x chunks must be at most {MOST_WORK}"
        )
    if problems:
        return problems
    if name in PLAIN and chunks not in {None, 1}:
        problems.append(f"{name}: chunks = {chunks}: must be 1 (use 'interleaved' for more)")
    elif name == "interleaved":
        if chunks == 1:
            problems.append("interleaved: chunks = 1: must be 2 or more (use '1f1b' for 1)")
        if micro_batches % stages:
            below = micro_batches - micro_batches % stages
            right = f"{below} or {below + stages}" if below else f"{stages}"
            problems.append(
                f"interleaved: micro-batches = {micro_batches}: must be a multiple of the {stages} stages "
                f"(use {right})"
            )
    elif name not in PLAIN and chunks not in {None, 2}:
        problems.append(f"{name}: chunks = {chunks}: must be 2")
    return problems
