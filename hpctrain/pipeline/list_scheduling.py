"""List scheduling of V-shaped pipelines: turns priorities of actions into an order that keeps stages busy.

Each stage has four streams of actions, each in the order of the micro-batches: F of chunk 0 is stream 0, F of
chunk 1 is stream 1, I of chunk 0 is stream 2, and I of chunk 1 is stream 3. Each action has a priority; lower
numbers come first. Whenever a stage is idle, it takes the action with the lowest number that it has not run.
If the input of this action has not arrived, it takes another one that is ready. Weight gradients (W) fill the
gaps, and free memory when the activations are at their limit.

After a send, a stage continues only when the receiver has started to process the previous message. So no
schedule that is made here can deadlock, even if sends block.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.pipeline.action import Action, Schedule
from hpctrain.pipeline.simulate import PartTimes

FORWARD_0, FORWARD_1, GRADIENT_0, GRADIENT_1 = range(4)
STREAMS = range(4)
_WEIGHT_GRADIENT = 4  # result of `choose` for the oldest weight gradient (W), which is in no stream


@dataclass(frozen=True)
class ListPriorities:
    """Priorities of all actions, and what to do if the first one is not ready.

    Attributes:
        priorities: For each stage, stream and micro-batch, the priority; increasing with the micro-batch.
            Lower numbers come first.
        patience: The stage waits for its first action, instead of running another one, if the wait is at most
            this fraction of the other's duration.
        finish_first: If True, actions that are ready and complete a micro-batch come before F of chunk 0,
            which starts a new one.
    """

    priorities: Sequence[Sequence[Sequence[float]]]
    patience: float = 0.5
    finish_first: bool = False


class _StageProgress:
    """State of one stage while `list_schedule` simulates all stages: what it has run and what has arrived.

    Args:
        durations: Durations as from `PartTimes.stage_durations`.
        micro_batches: Number of micro-batches.
        priorities: Priorities of this stage, by stream and micro-batch.
    """

    def __init__(
        self, durations: tuple[float, ...], micro_batches: int, priorities: Sequence[Sequence[float]]
    ) -> None:
        self.durations = durations
        self.priorities = priorities
        self.micro_batches = micro_batches
        self.arrivals = [[math.inf] * micro_batches for _ in STREAMS]
        self.next = [0, 0, 0, 0]
        self.heads = sorted((of_stream[0], stream) for stream, of_stream in enumerate(priorities))
        self.live = 0  # (chunk, micro-batch) pairs whose activations it holds
        self.weight_gradients: deque[tuple[int, int]] = deque()  # chunk and micro-batch
        self.free_at = 0.0
        self.start: float | None = None
        self.work_left = micro_batches * math.fsum(durations)
        # Stage, stream and micro-batch of a send that may be incomplete.
        self.pending_send: tuple[int, int, int] | None = None
        self.actions: list[Action] = []

    def choose(self, now: float, limit: int, plan: ListPriorities) -> int | None:
        """Return what the idle stage does next.

        Args:
            now: Time of the simulation.
            limit: Number of (chunk, micro-batch) pairs whose activations the stage may hold.
            plan: Priorities of all stages, with the rules for an action that is not ready.

        Returns:
            Stream whose next action it runs, or `_WEIGHT_GRADIENT`; None if it waits.
        """
        upcoming, arrivals, heads = self.next, self.arrivals, self.heads
        if not heads:
            return _WEIGHT_GRADIENT if self.weight_gradients else None
        if plan.finish_first:
            by_progress = [
                (head[1] == 0 or arrivals[head[1]][upcoming[head[1]]] > now, head) for head in heads
            ]
            heads = [head for _, head in sorted(by_progress)]
        first = heads[0][1]
        ready = arrivals[first][upcoming[first]]
        if ready <= now:
            if first >= GRADIENT_0 or self.live < limit:
                return first
            if self.weight_gradients:
                return _WEIGHT_GRADIENT
            wait = math.inf
        else:
            wait = ready - now
        for rank, stream in heads[1:]:
            if arrivals[stream][upcoming[stream]] > now or wait <= plan.patience * self.durations[stream]:
                continue
            if stream >= GRADIENT_0:
                return stream
            if self._leaves_memory(stream, rank, limit):
                return stream if self.live < limit else _WEIGHT_GRADIENT
        if not self.weight_gradients:
            return None
        duration = self.durations[_WEIGHT_GRADIENT + self.weight_gradients[0][0]]
        return _WEIGHT_GRADIENT if wait > plan.patience * duration else None

    def _leaves_memory(self, stream: int, priority: float, limit: int) -> bool:
        """Return True if a forward pass leaves memory for the actions that come before it by priority.

        Args:
            stream: Stream of the forward pass that would run early.
            priority: Its priority.
            limit: Number of (chunk, micro-batch) pairs whose activations the stage may hold.
        """
        live = self.live - len(self.weight_gradients) + 1
        following = list(self.next)
        following[stream] += 1
        while live <= limit:
            upcoming = [
                (self.priorities[k][following[k]], k) for k in STREAMS if following[k] < self.micro_batches
            ]
            if not upcoming:
                return True
            before, stream = min(upcoming)
            if before >= priority:
                return True
            following[stream] += 1
            live += 1 if stream < GRADIENT_0 else -1
        return False

    def execute(self, choice: int, now: float) -> int:
        """Record that the stage starts what `choose` returned, and return the action's micro-batch.

        Args:
            choice: Stream, or `_WEIGHT_GRADIENT`.
            now: Time of the simulation.
        """
        if self.start is None:
            self.start = now
        if choice == _WEIGHT_GRADIENT:
            chunk, micro_batch = self.weight_gradients.popleft()
            duration = self.durations[_WEIGHT_GRADIENT + chunk]
            self.live -= 1
            self.actions.append(Action("W", micro_batch, chunk))
        else:
            chunk, micro_batch = choice % 2, self.next[choice]
            duration = self.durations[choice]
            self.next[choice] += 1
            heads = [head for head in self.heads if head[1] != choice]
            if micro_batch + 1 < self.micro_batches:
                insort(heads, (self.priorities[choice][micro_batch + 1], choice))
            self.heads = heads
            if choice < GRADIENT_0:
                self.live += 1
                self.actions.append(Action("F", micro_batch, chunk))
            else:
                self.weight_gradients.append((chunk, micro_batch))
                self.actions.append(Action("I", micro_batch, chunk))
        self.free_at = now + duration
        self.work_left -= duration
        return micro_batch


def list_schedule(
    plan: ListPriorities, times: PartTimes, micro_batches: int, limit: int, bound: float = math.inf
) -> tuple[float, Schedule] | None:
    """Return the schedule that results from priorities, and its cost in time (see Simulation).

    Args:
        plan: The priorities.
        times: Times of all parts.
        micro_batches: Number of micro-batches.
        limit: Number of (chunk, micro-batch) pairs whose activations a stage may hold.
        bound: Cost, in the unit of `times`, at which to give up.

    Returns:
        Cost, which is the longest time that a stage is active, and schedule. None if no stage can continue
            within `limit`, or if the cost is at least `bound`.
    """
    count = times.stages
    stages = [
        _StageProgress(times.stage_durations(s), micro_batches, plan.priorities[s]) for s in range(count)
    ]
    stages[0].arrivals[FORWARD_0] = [0.0] * micro_batches
    following = [[_successor(stage, stream, times) for stream in STREAMS] for stage in range(count)]
    senders = {target[:2]: s for s in range(count) for target in following[s] if target and target[0] != s}
    events = [(0.0, 0)]
    while events:
        now, number = heapq.heappop(events)
        stage = stages[number]
        if stage.free_at > now:
            continue
        if stage.pending_send is not None:
            receiver, stream, micro_batch = stage.pending_send
            if stages[receiver].next[stream] < micro_batch:
                continue  # the receiver adds an event for this stage later
            stage.pending_send = None
        choice = stage.choose(now, limit, plan)
        if choice is None:
            continue
        micro_batch = stage.execute(choice, now)
        assert stage.start is not None
        if stage.free_at + stage.work_left - stage.start >= bound:
            return None
        heapq.heappush(events, (stage.free_at, number))
        if choice != _WEIGHT_GRADIENT:
            if (number, choice) in senders:
                heapq.heappush(events, (now, senders[number, choice]))
            target = following[number][choice]
            if target is not None:
                receiver, stream, delay = target
                stages[receiver].arrivals[stream][micro_batch] = stage.free_at + delay
                if receiver != number:
                    stage.pending_send = receiver, stream, micro_batch
                    heapq.heappush(events, (stage.free_at + delay, receiver))
    if any(len(stage.actions) < 6 * micro_batches for stage in stages):
        return None
    cost = max(stage.free_at - (stage.start or 0.0) for stage in stages)
    return cost, Schedule(tuple(tuple(stage.actions) for stage in stages), placement="v")


def _successor(stage: int, stream: int, times: PartTimes) -> tuple[int, int, float] | None:
    """Return the stage and stream that wait for a result of this one, and the time that its message takes."""
    forward, final = stream < GRADIENT_0, 2 * times.stages - 1
    part = final - stage if stream % 2 else stage
    if part == (final if forward else 0):
        return (stage, GRADIENT_1, 0.0) if forward else None
    after = part + 1 if forward else part - 1
    chunk = int(after >= times.stages)
    receiver = final - after if chunk else after
    delay = 0.0 if receiver == stage else times.communication[min(part, after)]
    return receiver, chunk if forward else GRADIENT_0 + chunk, delay
