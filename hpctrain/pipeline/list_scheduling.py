"""List scheduling of V-shaped pipelines: from wishes about the order to an order that keeps stages busy.

A stage has four streams of work, each done in the order of the micro-batches: forward of chunk 0 and of
chunk 1, input gradient of chunk 0 and of chunk 1. A plan gives every piece of them a rank. Whenever a stage
is free it takes the piece of lowest rank that it has not done, and where that one's data is not there yet,
something that is; weight gradients fill the gaps, and make room where the activations are at their limit.
A stage that has sent a tensor goes on when the receiver has begun to work on the one before it, so that no
schedule made here can deadlock, even where sends block.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.pipeline.action import Action, Schedule

FORWARD_0, FORWARD_1, GRADIENT_0, GRADIENT_1 = range(4)
STREAMS = range(4)
_WEIGHT = 4


@dataclass(frozen=True)
class ListPriorities:
    """What is wished: a rank for every piece of work, and how to act where the first one must wait."""

    ranks: Sequence[Sequence[Sequence[float]]]
    """Per stage, stream and micro-batch; rising with the micro-batch."""
    patience: float = 0.5
    """Wait for the first piece, rather than do another, for at most this part of the other's time."""
    hasty: bool = False
    """Do what leads to the end of a micro-batch before a new one is let in, if its data is there."""


@dataclass(frozen=True)
class PartTimes:
    """Times of every part of the model, and of every boundary between parts."""

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    communication: Sequence[float]

    @property
    def stages(self) -> int:
        """Stages of the V."""
        return len(self.forward) // 2

    def of_stage(self, stage: int) -> tuple[float, ...]:
        """Durations of a piece of the four streams, and of the weight gradients of chunks 0 and 1."""
        parts = stage, 2 * self.stages - 1 - stage  # down, and up again
        kinds = self.forward, self.input_gradient, self.weight_gradient
        return tuple(times[part] for times in kinds for part in parts)


class _Stage:
    """What a stage has done and what has come to it."""

    def __init__(
        self, durations: tuple[float, ...], micro_batches: int, ranks: Sequence[Sequence[float]]
    ) -> None:
        self.durations = durations
        self.ranks = ranks
        self.micro_batches = micro_batches
        self.arrivals = [[math.inf] * micro_batches for _ in STREAMS]
        self.next = [0, 0, 0, 0]
        self.heads = sorted((of_stream[0], stream) for stream, of_stream in enumerate(ranks))
        self.alive = 0  # micro-batches of a chunk whose activations are held
        self.weights: deque[tuple[int, int]] = deque()  # chunk and micro-batch
        self.free = 0.0
        self.begin: float | None = None
        self.work_left = micro_batches * math.fsum(durations)
        # Stage, stream and micro-batch of a send that is not known to end.
        self.sent: tuple[int, int, int] | None = None
        self.actions: list[Action] = []

    def choose(self, now: float, limit: int, plan: ListPriorities) -> int | None:
        """The stream to go on with, `_WEIGHT`, or None to wait."""
        upcoming, arrivals, heads = self.next, self.arrivals, self.heads
        if not heads:
            return _WEIGHT if self.weights else None
        if plan.hasty:
            by_end = [(head[1] == 0 or arrivals[head[1]][upcoming[head[1]]] > now, head) for head in heads]
            heads = [head for _, head in sorted(by_end)]
        first = heads[0][1]
        ready = arrivals[first][upcoming[first]]
        if ready <= now:
            if first >= GRADIENT_0 or self.alive < limit:
                return first
            if self.weights:
                return _WEIGHT
            wait = math.inf
        else:
            wait = ready - now
        for rank, stream in heads[1:]:
            if arrivals[stream][upcoming[stream]] > now or wait <= plan.patience * self.durations[stream]:
                continue
            if stream >= GRADIENT_0:
                return stream
            if self._fits(stream, rank, limit):
                return stream if self.alive < limit else _WEIGHT
        if self.weights and wait > plan.patience * self.durations[_WEIGHT + self.weights[0][0]]:
            return _WEIGHT
        return None

    def _fits(self, early: int, rank: float, limit: int) -> bool:
        """Whether a forward of that rank may go first: the ones before it must still find room."""
        held = self.alive - len(self.weights) + 1
        following = list(self.next)
        following[early] += 1
        while held <= limit:
            left = [(self.ranks[k][following[k]], k) for k in STREAMS if following[k] < self.micro_batches]
            if not left:
                return True
            before, stream = min(left)
            if before >= rank:
                return True
            following[stream] += 1
            held += 1 if stream < GRADIENT_0 else -1
        return False

    def do(self, choice: int, now: float) -> int:
        """Note the work as done; which micro-batch it was."""
        if self.begin is None:
            self.begin = now
        if choice == _WEIGHT:
            chunk, micro_batch = self.weights.popleft()
            duration = self.durations[_WEIGHT + chunk]
            self.alive -= 1
            self.actions.append(Action("W", micro_batch, chunk))
        else:
            chunk, micro_batch = choice % 2, self.next[choice]
            duration = self.durations[choice]
            self.next[choice] += 1
            heads = [head for head in self.heads if head[1] != choice]
            if micro_batch + 1 < self.micro_batches:
                insort(heads, (self.ranks[choice][micro_batch + 1], choice))
            self.heads = heads
            if choice < GRADIENT_0:
                self.alive += 1
                self.actions.append(Action("F", micro_batch, chunk))
            else:
                self.weights.append((chunk, micro_batch))
                self.actions.append(Action("I", micro_batch, chunk))
        self.free = now + duration
        self.work_left -= duration
        return micro_batch


def arrange(
    plan: ListPriorities, times: PartTimes, micro_batches: int, limit: int, bound: float = math.inf
) -> tuple[float, Schedule] | None:
    """Cost (longest span of a stage) and schedule that come of the plan.

    `limit` is the most micro-batches of a chunk whose activations a stage may hold. None if the plan comes
    to a stop at that limit, or would cost `bound` or more.
    """
    count = times.stages
    stages = [_Stage(times.of_stage(s), micro_batches, plan.ranks[s]) for s in range(count)]
    stages[0].arrivals[FORWARD_0] = [0.0] * micro_batches
    following = [[_following(stage, stream, times) for stream in STREAMS] for stage in range(count)]
    senders = {target[:2]: s for s in range(count) for target in following[s] if target and target[0] != s}
    events = [(0.0, 0)]
    while events:
        now, number = heapq.heappop(events)
        stage = stages[number]
        if stage.free > now:
            continue
        if stage.sent is not None:
            receiver, stream, micro_batch = stage.sent
            if stages[receiver].next[stream] < micro_batch:
                continue  # woken by the receiver
            stage.sent = None
        choice = stage.choose(now, limit, plan)
        if choice is None:
            continue
        micro_batch = stage.do(choice, now)
        assert stage.begin is not None
        if stage.free + stage.work_left - stage.begin >= bound:
            return None
        heapq.heappush(events, (stage.free, number))
        if choice != _WEIGHT:
            if (number, choice) in senders:
                heapq.heappush(events, (now, senders[number, choice]))
            target = following[number][choice]
            if target is not None:
                receiver, stream, delay = target
                stages[receiver].arrivals[stream][micro_batch] = stage.free + delay
                if receiver != number:
                    stage.sent = receiver, stream, micro_batch
                    heapq.heappush(events, (stage.free + delay, receiver))
    if any(len(stage.actions) < 6 * micro_batches for stage in stages):
        return None
    cost = max(stage.free - (stage.begin or 0.0) for stage in stages)
    return cost, Schedule(tuple(tuple(stage.actions) for stage in stages), placement="v")


def _following(stage: int, stream: int, times: PartTimes) -> tuple[int, int, float] | None:
    """Stage and stream that wait for a piece of this one, and what it takes to get there."""
    forward, final = stream < GRADIENT_0, 2 * times.stages - 1
    part = final - stage if stream % 2 else stage
    if part == (final if forward else 0):
        return (stage, GRADIENT_1, 0.0) if forward else None
    after = part + 1 if forward else part - 1
    chunk = int(after >= times.stages)
    receiver = final - after if chunk else after
    delay = 0.0 if receiver == stage else times.communication[min(part, after)]
    return receiver, chunk if forward else GRADIENT_0 + chunk, delay
