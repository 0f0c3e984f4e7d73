"""What a schedule costs: when every action starts and ends, the bubble, and the activations it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Schedule
from hpctrain.text import either


@dataclass(frozen=True)
class StageTimes:
    """Seconds (or any other unit) that a micro-batch takes.

    A number is the time of a whole stage, shared evenly by its chunks. A sequence gives every stage its
    own time, or, with several chunks, every part of the model (`Schedule.parts`). `communication` is what
    a tensor needs from one stage to the next: a number, or one for each boundary between parts; parts on
    one stage need none. The whole backward `B` takes `input_gradient + weight_gradient`.

    Raises HpctrainError for a time that is negative or not finite.
    """

    forward: float | Sequence[float] = 1.0
    input_gradient: float | Sequence[float] = 1.0
    weight_gradient: float | Sequence[float] = 1.0
    communication: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        problems = []
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = [value] if isinstance(value, (int, float)) else value
            problems += [
                f"times: {field.name.replace('_', ' ')} = {number}: must be a number of at least 0"
                for number in numbers
                if not (math.isfinite(number) and number >= 0)
            ]
        if problems:
            raise HpctrainError(problems)


@dataclass(frozen=True)
class Simulation:
    """The schedule in time; the unit is that of the times given. Tuples hold one entry a stage."""

    start: tuple[tuple[float, ...], ...]  # when each action of each stage starts
    end: tuple[tuple[float, ...], ...]  # when each action of each stage ends
    cost: float
    """Longest span of a stage, from the start of its first to the end of its last action: what a step takes
    where steps follow one another."""
    finish: float  # end of the last action of all
    ideal: float  # work of the stage that has most: m (T_F + T_B + T_W)
    idle: tuple[float, ...]  # time out of `cost` in which the stage does not work
    peak_activations: tuple[float, ...]
    """Most micro-batches whose activations a stage holds at once, see `peak_activations`."""

    @property
    def bubble_rate(self) -> float:
        """Part of `cost` that is lost: 1 - ideal / cost."""
        return max(0.0, 1 - self.ideal / self.cost) if self.cost else 0.0


def simulate(schedule: Schedule, times: StageTimes) -> Simulation:
    """Let every stage do its actions in order, each as soon as its data is there; sends never block.

    The schedule is to be a good one (see `hpctrain.pipeline.check`). Raises HpctrainError where it cannot
    come to its end, and for sequences of times that do not fit it.
    """
    starts, ends = reached(schedule, times)
    problems = [
        f"schedule: stage {stage} never starts {actions[len(started)]}, because the actions that it "
        "requires do not complete"
        for stage, (actions, started) in enumerate(zip(schedule.stages, starts, strict=True))
        if len(started) < len(actions)
    ]
    if problems:
        raise HpctrainError(problems)
    return summarize(schedule, starts, ends)


def reached(schedule: Schedule, times: StageTimes) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of each action of every stage, up to the first one whose data never comes."""
    forward, input_gradient, weight_gradient, communication = spread(times, schedule)
    whole = [one + other for one, other in zip(input_gradient, weight_gradient, strict=True)]
    durations = [*forward, *input_gradient, *weight_gradient, *whole]  # as a Wire counts them
    delays = [*communication, 0.0]
    wires = schedule.wires
    ends: list[float | None] = [None] * wires.results
    ends[wires.nothing] = 0.0
    waiting: dict[int, int] = {}  # the result that is waited for, and the stage that waits
    starts_by_stage: list[list[float]] = [[] for _ in schedule.stages]
    ends_by_stage: list[list[float]] = [[] for _ in schedule.stages]
    runnable = list(range(schedule.stage_count))
    while runnable:
        stage = runnable.pop()
        starts, finishes = starts_by_stage[stage], ends_by_stage[stage]
        now = finishes[-1] if finishes else 0.0
        for need, delay, duration, result in wires.of_stages[stage][len(starts) :]:
            ready = ends[need]
            if ready is None:
                waiting[need] = stage
                break
            begin = max(now, ready + delays[delay])
            now = begin + durations[duration]
            starts.append(begin)
            finishes.append(now)
            if ends[result] is None:
                ends[result] = now
                if result in waiting:
                    runnable.append(waiting.pop(result))
    return starts_by_stage, ends_by_stage


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Most micro-batches of which each stage holds activations at once.

    A micro-batch in one chunk counts 1/chunks, so that the unit is always what one micro-batch leaves in the
    whole stage.
    """
    return tuple(most / schedule.chunks for most in schedule.most_alive)


def spread(
    times: StageTimes, schedule: Schedule
) -> tuple[list[float], list[float], list[float], list[float]]:
    """The times of every part, and of every boundary between parts."""
    problems: list[str] = []

    def of_parts(name: str, value: float | Sequence[float]) -> list[float]:
        if isinstance(value, (int, float)):
            return [value / schedule.chunks] * schedule.parts
        if len(value) == schedule.parts:
            return list(value)
        if len(value) == schedule.stage_count:
            return [value[schedule.home(part)[0]] / schedule.chunks for part in range(schedule.parts)]
        right = either(dict.fromkeys((1, schedule.stage_count, schedule.parts)))
        problems.append(f"times: {name}: expected {right} numbers, got {len(value)}")
        return []

    def of_boundaries(value: float | Sequence[float]) -> list[float]:
        count = schedule.parts - 1
        numbers = [value] * count if isinstance(value, (int, float)) else value
        if len(numbers) != count:
            problems.append(f"times: communication: expected 1 or {count} numbers, got {len(numbers)}")
            return []
        return [
            0.0 if schedule.home(part)[0] == schedule.home(part + 1)[0] else number
            for part, number in enumerate(numbers)
        ]

    spread = (
        of_parts("forward", times.forward),
        of_parts("input gradient", times.input_gradient),
        of_parts("weight gradient", times.weight_gradient),
        of_boundaries(times.communication),
    )
    if problems:
        raise HpctrainError(problems)
    return spread


def summarize(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> Simulation:
    """Cost, ideal and idle times of a schedule whose actions start and end so, simulated or measured."""
    spans = [last[-1] - first[0] for first, last in zip(starts, ends, strict=True) if first]
    work = [
        math.fsum(end - start for start, end in zip(first, last, strict=True))
        for first, last in zip(starts, ends, strict=True)
    ]
    cost = max(spans, default=0.0)
    return Simulation(
        start=tuple(map(tuple, starts)),
        end=tuple(map(tuple, ends)),
        cost=cost,
        finish=max((last[-1] for last in ends if last), default=0.0),
        ideal=max(work, default=0.0),
        idle=tuple(max(0.0, cost - busy) for busy in work),
        peak_activations=peak_activations(schedule),
    )
