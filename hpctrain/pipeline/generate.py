"""Schedules by name, and the simple ones among them.

All schedules run the backward passes of a chunk in the order of the micro-batches, and its weight gradients
too. So gradients are added in the same order, and have the same bits, in every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hpctrain.deck.schedules import SCHEDULE_NAMES
from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Action, Kind, Schedule
from hpctrain.pipeline.dual_pipe import dual_pipe_v
from hpctrain.pipeline.simulate import StageTimes, peak_activations
from hpctrain.pipeline.v_schedule import LIMITS, search_v_schedule
from hpctrain.pipeline.zero_bubble import zb_h1, zb_h2
from hpctrain.text import either, nearest

MAX_STAGES, MAX_MICRO_BATCHES, MAX_CHUNKS = 10_000, 1_000_000, 1_000
"""Largest numbers that the text format of schedules can express."""
MAX_ACTIONS = 10_000_000
"""Largest number of forward passes of a generated schedule."""


def naive(stages: int, micro_batches: int) -> Schedule:
    """Return the schedule that sends one micro-batch at a time through all stages and back."""
    actions = tuple(Action(kind, index) for index in range(micro_batches) for kind in _FORWARD_BACKWARD)
    return Schedule((actions,) * stages, "naive")


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Return GPipe: all forward passes, then all backward passes (Huang et al., arXiv 1811.06965)."""
    actions = tuple(Action(kind, index) for kind in _FORWARD_BACKWARD for index in range(micro_batches))
    return Schedule((actions,) * stages, "gpipe")


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """Return 1F1B: after a warm-up, one forward and one backward pass alternate.

    This is PipeDream-Flush (Narayanan et al., arXiv 2006.09503). It is as fast as GPipe, but stage i of p
    holds the activations of at most p - i micro-batches.
    """
    forwards, backwards = (
        [Action(kind, index) for index in range(micro_batches)] for kind in _FORWARD_BACKWARD
    )
    orders = (_alternate(forwards, backwards, warm_up=stages - stage - 1) for stage in range(stages))
    return Schedule(tuple(orders), "1f1b")


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Return interleaved 1F1B, with several chunks per stage (Narayanan et al., arXiv 2104.04473).

    Micro-batches pass through all chunks in groups of `stages`, so that a bubble lasts for a chunk, not for a
    whole stage. `micro_batches` must be a multiple of `stages`.
    """
    rounds = range(0, micro_batches, stages)
    up, down = range(chunks), range(chunks)[::-1]
    forwards = [Action("F", r + i, chunk) for r in rounds for chunk in up for i in range(stages)]
    backwards = [Action("B", r + i, chunk) for r in rounds for chunk in down for i in range(stages)]
    warm_ups = (2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages))
    return Schedule(tuple(_alternate(forwards, backwards, each) for each in warm_ups), "interleaved")


_FORWARD_BACKWARD: tuple[Kind, Kind] = ("F", "B")


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then one forward and one backward in turn, then the remaining backwards."""
    alternating = forwards[warm_up:]
    pairs = (each for pair in zip(alternating, backwards, strict=False) for each in pair)
    return (*forwards[:warm_up], *pairs, *backwards[len(alternating) :])


# Schedules with one chunk per stage.
ONE_CHUNK_SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}
SEARCHED_SCHEDULES = frozenset(LIMITS)
"""Schedules that a search finds for given times, within a limit of activations."""


def generate_schedule(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int | None = None,
    times: StageTimes | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """Return a schedule by name.

    Args:
        name: One of `SCHEDULE_NAMES`.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Chunks per stage of "interleaved", by default 2. All other schedules have a fixed number.
        times: Times for the schedules that are searched for; by default all passes are equally long and
            communication takes no time.
        memory_limit: Number of micro-batches whose activations a stage may hold, as in `peak_activations`.
            Searched schedules respect it; others raise an error if they exceed it.

    Raises:
        HpctrainError: The name is unknown, or the schedule is impossible with these numbers.
    """
    problems = _argument_problems(name, stages, micro_batches, chunks)
    if problems:
        raise HpctrainError(problems)
    if name in ONE_CHUNK_SCHEDULES:
        schedule = ONE_CHUNK_SCHEDULES[name](stages, micro_batches)
    elif name == "interleaved":
        schedule = interleaved(stages, micro_batches, 2 if chunks is None else chunks)
    elif name in SEARCHED_SCHEDULES:
        schedule = search_v_schedule(name, stages, micro_batches, times or StageTimes(), memory_limit)
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


def _argument_problems(name: str, stages: int, micro_batches: int, chunks: int | None) -> list[str]:
    if name not in SCHEDULE_NAMES:
        near = nearest(name.lower(), SCHEDULE_NAMES)
        hint = f"did you mean {near!r}?" if near else f"use {either(SCHEDULE_NAMES)}"
        return [f"unknown schedule {name!r} ({hint})"]
    problems = [
        f"{name}: {what} = {number}: must be from 1 to {most}"
        for what, number, most in (
            ("stages", stages, MAX_STAGES),
            ("micro-batches", micro_batches, MAX_MICRO_BATCHES),
            ("chunks", 1 if chunks is None else chunks, MAX_CHUNKS),
        )
        if not 1 <= number <= most
    ]
    if not problems and stages * micro_batches * (chunks or 1) > MAX_ACTIONS:
        problems.append(
            f"{name}: {stages} stages with {micro_batches} micro-batches exceed the limit: "
            f"stages x micro-batches x chunks must be at most {MAX_ACTIONS}"
        )
    if problems:
        return problems
    if name in ONE_CHUNK_SCHEDULES and chunks not in {None, 1}:
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
    elif name not in ONE_CHUNK_SCHEDULES and chunks not in {None, 2}:
        problems.append(f"{name}: chunks = {chunks}: must be 2")
    return problems
