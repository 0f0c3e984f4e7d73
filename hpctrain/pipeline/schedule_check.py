"""Check of a schedule: missing and repeated actions, their order, deadlocks and the limit of activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Action, Kind, Schedule, live_activations

_MAX_PROBLEMS_PER_STAGE = 10
"""Largest number of missing actions that are reported for a stage."""


@dataclass(frozen=True)
class ScheduleProblem:
    """Problem with one action of a schedule.

    Attributes:
        stage: Number of the stage.
        index: Position of the action in the stage, from 0; None if it is missing.
        action: The action.
        reason: Rest of the sentence whose subject is the action.
    """

    stage: int
    index: int | None
    action: Action
    reason: str

    def __str__(self) -> str:
        where = "" if self.index is None else f" (action {self.index + 1})"
        return f"stage {self.stage}, {self.action}{where}: {self.reason}"


def check_schedule(schedule: Schedule, limit: float | None = None) -> list[ScheduleProblem]:
    """Return the problems of a schedule; an empty list if it can run.

    These are checked: Each micro-batch passes each chunk exactly once, forward and backward. The order of
    each stage is possible. No stages wait for each other in a cycle, neither if sends complete at once nor if
    a send blocks until its receive is posted. For this, each stage is assumed to post its receives ahead, for
    each boundary and direction in the order in which it needs them, and at most as many as there are stages.

    Args:
        schedule: The schedule.
        limit: If given, number of micro-batches whose activations a stage may hold at once, in the unit of
            `hpctrain.pipeline.simulate.peak_activations`.
    """
    stages = range(schedule.stage_count)
    problems = [problem for stage in stages for problem in _check_completeness(schedule, stage)]
    if not problems:
        problems = [problem for stage in stages for problem in _check_order(schedule, stage)]
    if not problems:
        problems = _check_deadlock(schedule, blocking=False) or _check_deadlock(schedule, blocking=True)
    if limit is not None:
        problems += _check_activations(schedule, limit)
    return problems


def schedule_error(
    problems: Sequence[ScheduleProblem], source: str = "schedule", lines: Sequence[int] | None = None
) -> HpctrainError:
    """Return an error with a line for each problem.

    Args:
        problems: The problems.
        source: Path of the schedule's file, or another name.
        lines: Line of each stage in that file, if any.
    """
    return HpctrainError(
        [f"{source}{f':{lines[problem.stage]}' if lines else ''}: {problem}" for problem in problems]
    )


def _check_completeness(schedule: Schedule, stage: int) -> Iterator[ScheduleProblem]:
    """Yield the problems with actions of a stage that are missing, repeated or in two forms."""
    indices: dict[Action, int] = {}
    for index, action in enumerate(schedule.stages[stage]):
        first = indices.setdefault(action, index)
        if first != index:
            yield ScheduleProblem(stage, index, action, f"is a duplicate of action {first + 1}")
    yield from islice(_missing_actions(schedule, stage, indices), _MAX_PROBLEMS_PER_STAGE)


def _missing_actions(schedule: Schedule, stage: int, indices: dict[Action, int]) -> Iterator[ScheduleProblem]:
    for micro_batch in range(max(1, schedule.micro_batches)):
        for chunk in range(schedule.chunks):
            forward, backward, inputs, weights = (Action(kind, micro_batch, chunk) for kind in _KINDS)
            if forward not in indices:
                yield ScheduleProblem(stage, None, forward, "is missing")
            if backward in indices:
                reason = f"is a duplicate: {backward} already contains {inputs} and {weights}"
                for piece in (inputs, weights):
                    if piece in indices:
                        yield ScheduleProblem(stage, indices[piece], piece, reason)
            elif (inputs in indices) != (weights in indices):
                present, absent = (inputs, weights) if inputs in indices else (weights, inputs)
                reason = f"is missing: {present} is only a part of the backward pass"
                yield ScheduleProblem(stage, None, absent, reason)
            elif inputs not in indices:
                reason = f"is missing, as are {inputs} and {weights}"
                yield ScheduleProblem(stage, None, backward, reason)


_KINDS: tuple[Kind, Kind, Kind, Kind] = ("F", "B", "I", "W")


def _check_order(schedule: Schedule, stage: int) -> Iterator[ScheduleProblem]:
    """Yield the actions that come before one of the same stage that they require, directly or indirectly."""
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


# Direction of a message (True for activations, False for gradients), and the part that sends it.
_Channel = tuple[bool, int]


@dataclass(frozen=True)
class _BlockedAction:
    """Action at which a stage waits.

    Attributes:
        index: Position of the action in the stage.
        is_send: True if the action is computed and its result cannot be sent, False if its input has not
            arrived.
        channel: Channel of that message.
        peer: Stage at the other end of the channel.
    """

    index: int
    is_send: bool
    channel: _Channel
    peer: int


class _ScheduleRun:
    """Run of all stages without times, until each has completed its actions or is blocked.

    The schedule must be complete, and each stage's own order must be possible.

    Args:
        schedule: The schedule.
        blocking: True if a send blocks until its receive is posted.

    Attributes:
        receive_order: For each channel, the micro-batches in the order in which the receiver needs them.
        arrived: For each channel, the micro-batches that have arrived and are not processed.
        received_counts: For each channel, the number of messages that the receiver has processed.
        positions: For each stage, the index of its current action.
        blocked: Blocked action of each stage that cannot continue.
    """

    def __init__(self, schedule: Schedule, *, blocking: bool) -> None:
        self.schedule, self.blocking = schedule, blocking
        self.receive_order: dict[_Channel, list[int]] = defaultdict(list)
        for stage, actions in enumerate(schedule.stages):
            for action in actions:
                channel, _ = self._channel(stage, action, incoming=True)
                if channel is not None:
                    self.receive_order[channel].append(action.micro_batch)
        self.arrived: dict[_Channel, set[int]] = defaultdict(set)
        self.received_counts: dict[_Channel, int] = defaultdict(int)
        self.positions = [0] * schedule.stage_count
        self.blocked: dict[int, _BlockedAction] = {}
        computed = [False] * schedule.stage_count  # True if only the send of the current action remains
        # Stage that waits to receive (False) or to send (True).
        waiting: dict[tuple[_Channel, bool], int] = {}
        runnable = list(range(schedule.stage_count))
        while runnable:
            stage = runnable.pop()
            self.blocked.pop(stage, None)
            while self.positions[stage] < len(schedule.stages[stage]):
                index = self.positions[stage]
                action = schedule.stages[stage][index]
                if not computed[stage]:
                    channel, other = self._channel(stage, action, incoming=True)
                    if channel is not None:
                        if action.micro_batch not in self.arrived[channel]:
                            self.blocked[stage] = _BlockedAction(index, False, channel, other)
                            waiting[channel, False] = stage
                            break
                        self.arrived[channel].remove(action.micro_batch)
                        self.received_counts[channel] += 1
                        if (channel, True) in waiting:
                            runnable.append(waiting.pop((channel, True)))
                    computed[stage] = True
                channel, other = self._channel(stage, action, incoming=False)
                if channel is not None:
                    if not self._send_completes(channel, action.micro_batch):
                        self.blocked[stage] = _BlockedAction(index, True, channel, other)
                        waiting[channel, True] = stage
                        break
                    self.arrived[channel].add(action.micro_batch)
                    if (channel, False) in waiting:
                        runnable.append(waiting.pop((channel, False)))
                computed[stage] = False
                self.positions[stage] += 1

    def cycle(self) -> list[int]:
        """Return the stages that wait for each other in a cycle; an empty list if all stages completed."""
        if not self.blocked:
            return []
        stage, path = min(self.blocked), list[int]()
        while stage not in path:
            path.append(stage)
            stage = self.blocked[stage].peer
        return sorted(path[path.index(stage) :])

    def problem(self, stage: int) -> ScheduleProblem:
        """Return a description of what a blocked stage waits for."""
        wait = self.blocked[stage]
        forward, part = wait.channel
        action = self.schedule.stages[stage][wait.index]
        peer = self.blocked[wait.peer]
        stuck = f"{'the send of ' if peer.is_send else ''}{self.schedule.stages[wait.peer][peer.index]}"
        if not wait.is_send:
            chunk = self.schedule.stage_and_chunk(part)[1]
            whole_backward = Action("B", action.micro_batch, chunk)
            input_gradient = Action("I", action.micro_batch, chunk)
            backward = whole_backward if whole_backward in self.schedule.stages[wait.peer] else input_gradient
            need = Action("F", action.micro_batch, chunk) if forward else backward
            reason = f"waits for {need} of stage {wait.peer}, which waits at {stuck}"
        else:
            order, waiting = self.receive_order[wait.channel], len(self.arrived[wait.channel])
            first = order[self.received_counts[wait.channel] + waiting]
            why = f"first receives micro-batch {first}"
            if first == action.micro_batch:
                why = f"already has {waiting} unprocessed tensors of this kind"
            reason = f"its send does not complete: stage {wait.peer} {why} and waits at {stuck}"
        kind = "deadlock with blocking sends" if self.blocking else "deadlock"
        return ScheduleProblem(stage, wait.index, action, f"{kind}: {reason}")

    def _channel(self, stage: int, action: Action, *, incoming: bool) -> tuple[_Channel | None, int]:
        """Return the channel of an action's input or result, and the stage at its other end.

        The channel is None if the tensor does not leave the stage or does not exist.
        """
        forward, part = action.kind == "F", self.schedule.part(stage, action.chunk)
        other_part = part + (1 if forward != incoming else -1)
        if action.kind == "W" or not 0 <= other_part < self.schedule.parts:
            return None, stage
        other = self.schedule.stage_and_chunk(other_part)[0]
        return (None if other == stage else (forward, other_part if incoming else part)), other

    def _send_completes(self, channel: _Channel, micro_batch: int) -> bool:
        """Return True if a send completes: at once, or because its receive is the next one that is posted."""
        if not self.blocking:
            return True
        unprocessed = len(self.arrived[channel])
        posted = unprocessed < self.schedule.stage_count
        return (
            posted and self.receive_order[channel][self.received_counts[channel] + unprocessed] == micro_batch
        )


def _check_deadlock(schedule: Schedule, *, blocking: bool) -> list[ScheduleProblem]:
    """Return one problem for each stage of a cycle of stages that wait for each other."""
    run = _ScheduleRun(schedule, blocking=blocking)
    return [run.problem(stage) for stage in run.cycle()]


def _check_activations(schedule: Schedule, limit: float) -> Iterator[ScheduleProblem]:
    """Yield for each stage the first action that exceeds the limit of activations."""
    for stage, actions in enumerate(schedule.stages):
        for index, (action, alive) in enumerate(zip(actions, live_activations(actions), strict=True)):
            if alive > limit * schedule.chunks:
                excess = f"holds activations of {alive / schedule.chunks:g} micro-batches"
                yield ScheduleProblem(stage, index, action, f"{excess}; the limit is {limit:g}")
                break
