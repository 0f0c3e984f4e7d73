"""Simulation of a schedule: start and end of every action, the bubble, and the activations of stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Schedule
from hpctrain.text import either


@dataclass(frozen=True)
class StageTimes:
    """Times that a micro-batch takes, in seconds or any other unit.

    A number is the time of a whole stage, shared evenly by its chunks. A sequence has a time for each stage
    or, if there are several chunks, for each part of the model (`Schedule.parts`). The whole backward pass
    `B` takes `input_gradient + weight_gradient`.

    Attributes:
        forward: Time of F.
        input_gradient: Time of I.
        weight_gradient: Time of W.
        communication: Time of a message between stages: a number, or a sequence with a number for each
            boundary between parts. Between parts on one stage it is 0.

    Raises:
        HpctrainError: A time is negative or not finite.
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
class PartTimes:
    """Times of every part of the model, and of every boundary between parts, in one unit.

    Attributes:
        forward: Time of F, for each part.
        input_gradient: Time of I, for each part.
        weight_gradient: Time of W, for each part.
        communication: Time of a message, for each boundary.
    """

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    communication: Sequence[float]

    @property
    def stages(self) -> int:
        """Number of stages of the V."""
        return len(self.forward) // 2

    def stage_durations(self, stage: int) -> tuple[float, ...]:
        """Return the durations of F of chunks 0 and 1, of I of chunks 0 and 1, and of W of chunks 0 and 1.

        F and I of the two chunks are the four streams of `list_schedule`. This is for a V placement: stage s
        of S holds the parts s and 2 S - 1 - s of the model.
        """
        parts = stage, 2 * self.stages - 1 - stage  # on the way down and up
        kinds = self.forward, self.input_gradient, self.weight_gradient
        return tuple(times[part] for times in kinds for part in parts)


@dataclass(frozen=True)
class Simulation:
    """Start and end of all actions of a schedule, in the unit of the given times.

    Attributes:
        start: Start of each action of each stage.
        end: End of each action of each stage.
        cost: Time of the schedule: the longest time that a stage is active, from the start of its first
            action to the end of its last one. This is the time of a step if steps follow one another.
        finish: End of the last action of all.
        ideal: Work of the busiest stage: m (T_F + T_B + T_W).
        idle: Time within `cost` in which each stage does not work.
        peak_activations: For each stage, as from the function `peak_activations`.
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    cost: float
    finish: float
    ideal: float
    idle: tuple[float, ...]
    peak_activations: tuple[float, ...]

    @property
    def bubble_rate(self) -> float:
        """Fraction of `cost` that is lost: 1 - ideal / cost."""
        return max(0.0, 1 - self.ideal / self.cost) if self.cost else 0.0


def simulate(schedule: Schedule, times: StageTimes) -> Simulation:
    """Simulate a schedule: each stage runs its actions in order, each as soon as its input has arrived.

    Sends never block. The schedule must pass `check_schedule`.

    Raises:
        HpctrainError: The schedule does not complete, or a sequence of times has the wrong length.
    """
    starts, ends = simulate_until_blocked(schedule, times)
    problems = [
        f"schedule: stage {stage} never starts {actions[len(started)]}, because the actions that it "
        "requires do not complete"
        for stage, (actions, started) in enumerate(zip(schedule.stages, starts, strict=True))
        if len(started) < len(actions)
    ]
    if problems:
        raise HpctrainError(problems)
    return summarize(schedule, starts, ends)


def simulate_until_blocked(
    schedule: Schedule, times: StageTimes
) -> tuple[list[list[float]], list[list[float]]]:
    """Return start and end of each action of every stage, up to the first one whose input never arrives."""
    parts = times_by_part(times, schedule)
    split = parts.input_gradient, parts.weight_gradient
    backward = [one + other for one, other in zip(*split, strict=True)]
    durations = [*parts.forward, *split[0], *split[1], *backward]  # in the order of `ActionIndices.duration`
    delays = [*parts.communication, 0.0]
    dependencies = schedule.dependencies
    ends: list[float | None] = [None] * dependencies.result_count
    ends[dependencies.always_ready] = 0.0
    waiting: dict[int, int] = {}  # stage that waits, by the result that it waits for
    starts_by_stage: list[list[float]] = [[] for _ in schedule.stages]
    ends_by_stage: list[list[float]] = [[] for _ in schedule.stages]
    runnable = list(range(schedule.stage_count))
    while runnable:
        stage = runnable.pop()
        starts, finishes = starts_by_stage[stage], ends_by_stage[stage]
        now = finishes[-1] if finishes else 0.0
        for need, delay, duration, result in dependencies.by_stage[stage][len(starts) :]:
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
    """Return for each stage the largest number of micro-batches whose activations it holds at once.

    A micro-batch in one chunk counts 1/chunks, so that the unit is the activations of one micro-batch in the
    whole stage.
    """
    return tuple(most / schedule.chunks for most in schedule.peak_live_chunks)


def times_by_part(times: StageTimes, schedule: Schedule) -> PartTimes:
    """Return the times of every part, and of every boundary between parts, from those that a StageTimes has.

    Args:
        times: Times of stages or parts, as one number for all or as sequences.
        schedule: Schedule that places the parts on the stages.

    Raises:
        HpctrainError: A sequence of times has the wrong length.
    """
    problems: list[str] = []

    def by_part(name: str, value: float | Sequence[float]) -> tuple[float, ...]:
        if isinstance(value, (int, float)):
            return (value / schedule.chunks,) * schedule.parts
        if len(value) == schedule.parts:
            return tuple(value)
        if len(value) == schedule.stage_count:
            return tuple(
                value[schedule.stage_and_chunk(part)[0]] / schedule.chunks for part in range(schedule.parts)
            )
        right = either(dict.fromkeys((1, schedule.stage_count, schedule.parts)))
        problems.append(f"times: {name}: expected {right} numbers, got {len(value)}")
        return ()

    def by_boundary(value: float | Sequence[float]) -> tuple[float, ...]:
        count = schedule.parts - 1
        numbers = [value] * count if isinstance(value, (int, float)) else value
        if len(numbers) != count:
            problems.append(f"times: communication: expected 1 or {count} numbers, got {len(numbers)}")
            return ()
        return tuple(
            0.0 if schedule.stage_and_chunk(part)[0] == schedule.stage_and_chunk(part + 1)[0] else number
            for part, number in enumerate(numbers)
        )

    parts = PartTimes(
        by_part("forward", times.forward),
        by_part("input gradient", times.input_gradient),
        by_part("weight gradient", times.weight_gradient),
        by_boundary(times.communication),
    )
    if problems:
        raise HpctrainError(problems)
    return parts


def summarize(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> Simulation:
    """Return cost, ideal and idle times of a schedule from measured or simulated start and end of actions."""
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
