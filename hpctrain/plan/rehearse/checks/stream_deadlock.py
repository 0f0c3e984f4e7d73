"""Simulation of a step on the streams of GPUs by NCCL's rules, which finds calls that would hang.

The host of a rank issues all its events and never waits. Events run on streams: each group has one for its
communicator, and groups whose ranks are neighbors of each other in messages have one for each channel
(`comm/transports/nccl.py`). An event starts when the one before on its stream is complete, and when the
compute stream has passed all waits that were issued before it. It is complete when all its partners
have started theirs. Messages have no tags. One rank is simulated for each class of identical ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hpctrain.comm.transports.choose import POINT_TO_POINT_AXES
from hpctrain.plan.rehearse.checks.rank_classes import ClassRelations, RankClasses
from hpctrain.plan.rehearse.fault import RehearsalFault
from hpctrain.plan.rehearse.programme import (
    AUDIT,
    RECEIVE,
    SEND,
    WAIT,
    Programme,
    RehearsedCall,
    StepProgrammes,
)
from hpctrain.text import counted

_SHOWN = 8
"""Number of ranks whose waits a fault describes."""

_Counter = tuple[str, str, int]
"""Operation ("" for collectives), group and step: what is counted to find the partner of an event."""


def without_tags(job: StepProgrammes) -> StepProgrammes:
    """Return the job with messages that only their order tells apart, as NCCL sends them."""
    return replace(
        job, programmes=[tuple(replace(event, tag=0) for event in events) for events in job.programmes]
    )


def find_stream_deadlock(job: StepProgrammes, classes: RankClasses) -> list[RehearsalFault]:
    """Return one fault for the ranks whose streams wait for each other; an empty list if all come to an end.

    Args:
        job: Programmes whose messages and calls match (`match_programmes`).
        classes: Classes of its ranks.
    """
    run = _StreamRun(job, classes)
    run.go()
    stuck = [number for number, state in enumerate(run.states) if not state.is_finished]
    if not stuck:
        return []
    firsts = [classes.firsts[number] for number in stuck]
    waits = [
        f"{job.place(rank)} waits for {run.describe(each)}" for rank, each in zip(firsts, stuck, strict=True)
    ]
    more = [f"and {len(waits) - _SHOWN} more"] if len(waits) > _SHOWN else []
    count = int(sum(classes.counts[each] for each in stuck))
    sentence = (
        f"streams of {counted(count, 'rank')} wait for each other by NCCL's rules: "
        f"{'; '.join([*waits[:_SHOWN], *more])} (issue the calls in another order)"
    )
    return [RehearsalFault("cyclic wait", firsts[0], count, sentence)]


class _ClassState:
    """Progress of the streams of the ranks of a class.

    Args:
        events: Programme of these ranks.
        streams: Name of the stream of each event; None for a wait.

    Attributes:
        numbers: Number of each event among those of its counter, from 1.
        started: Number of events of each counter that have started.
    """

    def __init__(self, events: Programme, streams: list[object]) -> None:
        self.events = events
        self.queues: dict[object, list[int]] = defaultdict(list)
        self.numbers: list[int] = []
        self.started: dict[_Counter, int] = defaultdict(int)
        self._waits: list[int] = []
        self._waits_before: list[int] = []
        self._passed = 0
        self._is_started = [False] * len(events)
        self._is_complete = [False] * len(events)
        counts: dict[_Counter, int] = defaultdict(int)
        for index, (event, stream) in enumerate(zip(events, streams, strict=True)):
            self._waits_before.append(len(self._waits))
            if event.operation != WAIT:
                counts[counter_of(event)] += 1
                self.queues[stream].append(index)
            self.numbers.append(counts[counter_of(event)])
            if event.operation == WAIT or event.blocking:
                self._waits.append(event.call_index if event.operation == WAIT else index)
        self._heads = dict.fromkeys(self.queues, 0)

    @property
    def is_finished(self) -> bool:
        """True if all events are complete."""
        return all(self._heads[stream] == len(queue) for stream, queue in self.queues.items())

    def heads(self) -> list[int]:
        """Return the next event of each stream that is not at its end."""
        return [
            queue[head] for stream, queue in self.queues.items() if (head := self._heads[stream]) < len(queue)
        ]

    def start(self, index: int) -> bool:
        """Start an event if the waits before it are passed. Return True if it starts now."""
        if self._is_started[index] or self._passed < self._waits_before[index]:
            return False
        self._is_started[index] = True
        self.started[counter_of(self.events[index])] += 1
        return True

    def has_started(self, index: int) -> bool:
        """Return True if the event has started."""
        return self._is_started[index]

    def complete(self, stream: object, index: int) -> None:
        """Complete the next event of a stream, and pass the waits that this allows."""
        self._is_complete[index] = True
        self._heads[stream] += 1
        while self._passed < len(self._waits) and self._is_complete[self._waits[self._passed]]:
            self._passed += 1

    @property
    def awaited(self) -> int:
        """Index of the event that the compute stream waits for, or of the next one of any stream."""
        return self._waits[self._passed] if self._passed < len(self._waits) else min(self.heads())


class _StreamRun:
    """Simulation of the streams of all classes."""

    def __init__(self, job: StepProgrammes, classes: RankClasses) -> None:
        self.job, self.classes = job, classes
        self.streams: list[list[object]] = []
        self.states: list[_ClassState] = []
        for first in classes.firsts:
            events = job.programmes[job.programme_of[first]]
            streams = [self._stream(event) for event in events]
            self.streams.append(streams)
            self.states.append(_ClassState(events, streams))
        self.relations = ClassRelations(job, classes)

    def go(self) -> None:
        """Start and complete events until nothing changes any more."""
        changes = True
        while changes:
            changes = False
            for number, state in enumerate(self.states):
                for index in state.heads():
                    changes |= state.start(index)
                    if state.has_started(index) and self._has_partners(number, index):
                        state.complete(self.streams[number][index], index)
                        changes = True

    def describe(self, number: int) -> str:
        """Return what the ranks of a class wait for, in words."""
        state = self.states[number]
        event, place = state.events[state.awaited], state.numbers[state.awaited]
        if not event.is_message:
            return f"{event} along {event.group}, call {place} there"
        verb, way = ("send", "to") if event.operation == SEND else ("receive", "from")
        peer = self.job.place(self.relations.peer_rank(number, event))
        return f"its {verb} of {event} along {event.group} {way} {peer}"

    def _stream(self, event: RehearsedCall) -> object:
        if event.operation == WAIT:
            return None
        if event.is_message and event.group.startswith(AUDIT):  # MPI carries it
            return event.group, event.operation, event.offset
        has_channels = tuple(event.group.split(" x ")) in POINT_TO_POINT_AXES
        if event.is_message and has_channels and event.offset in {1, self.job.groups[event.group].size - 1}:
            return event.group, event.operation, event.offset
        return event.group

    def _has_partners(self, number: int, index: int) -> bool:
        """Return True if all partners of an event have started theirs."""
        state = self.states[number]
        event, place = state.events[index], state.numbers[index]
        if event.is_message:
            size = self.job.groups[event.group].size
            other = RECEIVE if event.operation == SEND else SEND
            partner = other, event.group, -event.offset % size
            return self.states[self.relations.peer(number, event)].started[partner] >= place
        counter = counter_of(event)
        members = self.relations.members(number, event.group)
        return all(self.states[each].started[counter] >= place for each in members)


def counter_of(event: RehearsedCall) -> _Counter:
    """Return what the event is counted by: collectives by group, messages by operation, group and step."""
    return (event.operation, event.group, event.offset) if event.is_message else ("", event.group, 0)
