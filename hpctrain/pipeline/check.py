"""Whether a schedule is a good one, and where and why it is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Action, Kind, Schedule, live_activations

_MOST_A_STAGE = 10


@dataclass(frozen=True)
class ScheduleProblem:
    """What is wrong with one action of a schedule."""

    stage: int
    index: int | None  # its place among the actions of the stage, from 0; None where it is missing
    action: Action
    reason: str

    def __str__(self) -> str:
        where = "" if self.index is None else f" (action {self.index + 1})"
        return f"stage {self.stage}, {self.action}{where}: {self.reason}"


def check(schedule: Schedule, limit: float | None = None) -> list[ScheduleProblem]:
    """What is wrong with a schedule; nothing where it is good.

    Every piece of work is there once; each stage's order is one that its data allows; no stages wait for one
    another in a circle, neither where sends end at once, nor where a send blocks until its receive is posted.
    Receives are taken to be posted ahead for each boundary and direction in the order in which the receiver
    needs them, as many as there are stages. At no time does a stage hold activations of more than `limit`
    micro-batches (see `hpctrain.pipeline.simulate.peak_activations`).
    """
    problems = [problem for stage in range(schedule.stage_count) for problem in _work(schedule, stage)]
    if not problems:
        problems = [problem for stage in range(schedule.stage_count) for problem in _order(schedule, stage)]
    if not problems:
        problems = _deadlock(schedule, blocking=False) or _deadlock(schedule, blocking=True)
    if limit is not None:
        problems += _activations(schedule, limit)
    return problems


def refusal(
    problems: Sequence[ScheduleProblem], source: str = "schedule", lines: Sequence[int] | None = None
) -> HpctrainError:
    """The error that tells of the problems; `lines` are those of the stages in the file `source`."""
    return HpctrainError(
        [f"{source}{f':{lines[problem.stage]}' if lines else ''}: {problem}" for problem in problems]
    )


def _work(schedule: Schedule, stage: int) -> Iterator[ScheduleProblem]:
    """Work of a stage that is missing, doubled, or there in two forms."""
    indices: dict[Action, int] = {}
    for index, action in enumerate(schedule.stages[stage]):
        first = indices.setdefault(action, index)
        if first != index:
            yield ScheduleProblem(stage, index, action, f"is a duplicate of action {first + 1}")
    yield from islice(_missing(schedule, stage, indices), _MOST_A_STAGE)


def _missing(schedule: Schedule, stage: int, indices: dict[Action, int]) -> Iterator[ScheduleProblem]:
    for micro_batch in range(max(1, schedule.micro_batches)):
        for chunk in range(schedule.chunks):
            forward, whole, inputs, weights = (Action(kind, micro_batch, chunk) for kind in _KINDS)
            if forward not in indices:
                yield ScheduleProblem(stage, None, forward, "is missing")
            if whole in indices:
                reason = f"is a duplicate: {whole} already contains {inputs} and {weights}"
                for piece in (inputs, weights):
                    if piece in indices:
                        yield ScheduleProblem(stage, indices[piece], piece, reason)
            elif (inputs in indices) != (weights in indices):
                there, piece = (inputs, weights) if inputs in indices else (weights, inputs)
                reason = f"is missing: {there} is only a part of the backward pass"
                yield ScheduleProblem(stage, None, piece, reason)
            elif inputs not in indices:
                reason = f"is missing, as are {inputs} and {weights}"
                yield ScheduleProblem(stage, None, whole, reason)


_KINDS: tuple[Kind, Kind, Kind, Kind] = ("F", "B", "I", "W")


def _order(schedule: Schedule, stage: int) -> Iterator[ScheduleProblem]:
    """Actions that come before one of the same stage that they need, directly or through other stages."""
    actions = schedule.stages[stage]
    indices = {action: index for index, action in enumerate(actions)}
    for index, action in enumerate(actions):
        micro_batch, chunk = action.micro_batch, action.chunk
        needs: tuple[Action, ...]
        if action.kind == "F":
            needs = (Action("F", micro_batch, chunk - 1),)
        elif action.kind == "W":
            needs = (Action("I", micro_batch, chunk),)
        else:
            after = chunk + 1
            later = (Action("B", micro_batch, after), Action("I", micro_batch, after))
            needs = (Action("F", micro_batch, chunk), *later)
        for need in needs:
            if indices.get(need, index) > index:
                reason = f"requires {need}, which comes later (action {indices[need] + 1})"
                yield ScheduleProblem(stage, index, action, reason)


# The tensors over one boundary: whether activations (else gradients), and the part that they come from.
_Channel = tuple[bool, int]


@dataclass(frozen=True)
class _Wait:
    """Why a stage goes no further: what it waits for, and the stage that it waits for."""

    index: int
    sends: bool  # whether it cannot send the result of the action at `index`, or cannot start that action
    channel: _Channel
    other: int


class _ScheduleRun:
    """All stages doing their actions, without times, as far as they come.

    The work is to be complete, and the order within each stage a possible one.
    """

    def __init__(self, schedule: Schedule, *, blocking: bool) -> None:
        self.schedule, self.blocking = schedule, blocking
        self.asked: dict[_Channel, list[int]] = defaultdict(list)  # micro-batches in the receiver's order
        for stage, actions in enumerate(schedule.stages):
            for action in actions:
                channel, _ = self._channel(stage, action, incoming=True)
                if channel is not None:
                    self.asked[channel].append(action.micro_batch)
        self.there: dict[_Channel, set[int]] = defaultdict(set)  # arrived, not yet worked on
        self.taken: dict[_Channel, int] = defaultdict(int)
        self.at = [0] * schedule.stage_count
        self.waits: dict[int, _Wait] = {}  # by stage: those that go no further
        worked = [False] * schedule.stage_count  # whether all but the send of the action at `at` is done
        waiting: dict[tuple[_Channel, bool], int] = {}  # the stage that waits to receive, or to send
        runnable = list(range(schedule.stage_count))
        while runnable:
            stage = runnable.pop()
            self.waits.pop(stage, None)
            while self.at[stage] < len(schedule.stages[stage]):
                index = self.at[stage]
                action = schedule.stages[stage][index]
                if not worked[stage]:
                    channel, other = self._channel(stage, action, incoming=True)
                    if channel is not None:
                        if action.micro_batch not in self.there[channel]:
                            self.waits[stage] = _Wait(index, False, channel, other)
                            waiting[channel, False] = stage
                            break
                        self.there[channel].remove(action.micro_batch)
                        self.taken[channel] += 1
                        if (channel, True) in waiting:
                            runnable.append(waiting.pop((channel, True)))
                    worked[stage] = True
                channel, other = self._channel(stage, action, incoming=False)
                if channel is not None:
                    if not self._is_ready(channel, action.micro_batch):
                        self.waits[stage] = _Wait(index, True, channel, other)
                        waiting[channel, True] = stage
                        break
                    self.there[channel].add(action.micro_batch)
                    if (channel, False) in waiting:
                        runnable.append(waiting.pop((channel, False)))
                worked[stage] = False
                self.at[stage] += 1

    def circle(self) -> list[int]:
        """Stages that wait for one another in a circle; none where all came to their end."""
        if not self.waits:
            return []
        stage, seen = min(self.waits), list[int]()
        while stage not in seen:
            seen.append(stage)
            stage = self.waits[stage].other
        return sorted(seen[seen.index(stage) :])

    def problem(self, stage: int) -> ScheduleProblem:
        """What the stage waits for, in words."""
        wait = self.waits[stage]
        forward, part = wait.channel
        action = self.schedule.stages[stage][wait.index]
        there = self.waits[wait.other]
        stuck = f"{'the send of ' if there.sends else ''}{self.schedule.stages[wait.other][there.index]}"
        if not wait.sends:
            chunk = self.schedule.home(part)[1]
            whole = Action("B", action.micro_batch, chunk)
            halved = Action("I", action.micro_batch, chunk)
            backward = whole if whole in self.schedule.stages[wait.other] else halved
            need = Action("F", action.micro_batch, chunk) if forward else backward
            reason = f"waits for {need} of stage {wait.other}, which waits at {stuck}"
        else:
            asked, held = self.asked[wait.channel], len(self.there[wait.channel])
            first = asked[self.taken[wait.channel] + held]
            why = f"first receives micro-batch {first}"
            if first == action.micro_batch:
                why = f"already has {held} unprocessed tensors of this kind"
            reason = f"its send does not complete: stage {wait.other} {why} and waits at {stuck}"
        kind = "deadlock with blocking sends" if self.blocking else "deadlock"
        return ScheduleProblem(stage, wait.index, action, f"{kind}: {reason}")

    def _channel(self, stage: int, action: Action, *, incoming: bool) -> tuple[_Channel | None, int]:
        """The way of what an action needs, or makes, and the stage at its other end; None where it stays."""
        forward, part = action.kind == "F", self.schedule.part(stage, action.chunk)
        other_part = part + (1 if forward != incoming else -1)
        if action.kind == "W" or not 0 <= other_part < self.schedule.parts:
            return None, stage
        other = self.schedule.home(other_part)[0]
        return (None if other == stage else (forward, other_part if incoming else part)), other

    def _is_ready(self, channel: _Channel, micro_batch: int) -> bool:
        """Whether a send ends: at once, or because its receive is the next one that is posted."""
        if not self.blocking:
            return True
        held = len(self.there[channel])
        posted = held < self.schedule.stage_count
        return posted and self.asked[channel][self.taken[channel] + held] == micro_batch


def _deadlock(schedule: Schedule, *, blocking: bool) -> list[ScheduleProblem]:
    """One problem for each stage of a circle of stages that wait for one another."""
    run = _ScheduleRun(schedule, blocking=blocking)
    return [run.problem(stage) for stage in run.circle()]


def _activations(schedule: Schedule, limit: float) -> Iterator[ScheduleProblem]:
    """On each stage the first action that holds too many."""
    for stage, actions in enumerate(schedule.stages):
        for index, (action, alive) in enumerate(zip(actions, live_activations(actions), strict=True)):
            if alive > limit * schedule.chunks:
                held = f"holds activations of {alive / schedule.chunks:g} micro-batches"
                yield ScheduleProblem(stage, index, action, f"{held}; the limit is {limit:g}")
                break
