"""Simulation of a step by the rules of MPI, which finds ranks that wait for each other in a cycle.

Nothing is buffered: a send is complete when its receive is posted. A collective call is complete when all
ranks of its group have entered it. Started calls make progress only while a rank is in a wait, not in a
blocking collective call (see `Work`). So the wait for a started collective ends when each member has
waited for it, or is in a wait. One rank is simulated for each class of identical ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpctrain.plan.rehearse.checks.rank_classes import ClassRelations, RankClasses
from hpctrain.plan.rehearse.fault import RehearsalFault
from hpctrain.plan.rehearse.programme import RECEIVE, SEND, WAIT, Programme, RehearsedCall, StepProgrammes
from hpctrain.text import counted

Channel = tuple[str, int, int]
"""Group, offset of the peer, and tag of messages."""

_RANKS_IN_MESSAGE = 8
"""Number of ranks of a cycle that a fault describes."""


@dataclass
class _State:
    """Progress of the ranks of a class.

    Attributes:
        events: Programme of these ranks.
        numbers: Number of each event among those of its group, or of its messages to one peer, from 1.
        index: Index of the current event.
        entered: Number of collective calls entered, by group.
        posted: Number of messages posted, by operation and channel.
        started_groups: Groups in which a call was started.
        waited: Started calls for which the ranks have begun to wait, by group and number.
        started: True if the current event has begun.
    """

    events: Programme
    numbers: list[int]
    index: int = 0
    entered: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    posted: dict[tuple[str, Channel], int] = field(default_factory=lambda: defaultdict(int))
    started_groups: set[str] = field(default_factory=set)
    waited: set[tuple[str, int]] = field(default_factory=set)
    started: bool = False

    @property
    def current(self) -> RehearsedCall | None:
        """Current event; None at the end."""
        return self.events[self.index] if self.index < len(self.events) else None


def find_host_deadlock(job: StepProgrammes, classes: RankClasses) -> list[RehearsalFault]:
    """Return one fault for the ranks that wait for each other; an empty list if all programmes end.

    Args:
        job: Programmes whose messages and calls match (`match_programmes`).
        classes: Classes of its ranks.
    """
    simulation = _Simulation(job, classes)
    simulation.run()
    cycle = simulation.cycle()
    if not cycle:
        return []
    ranks = [classes.firsts[each] for each in cycle]
    parts = [
        f"{job.place(rank)} is at {simulation.describe(each)}"
        for rank, each in zip(ranks, cycle, strict=True)
    ]
    more = [f"and {len(parts) - _RANKS_IN_MESSAGE} more"] if len(parts) > _RANKS_IN_MESSAGE else []
    count = int(sum(classes.counts[each] for each in cycle))
    waits = "; ".join([*parts[:_RANKS_IN_MESSAGE], *more])
    sentence = f"{counted(len(cycle), 'rank')} wait for each other in a cycle: {waits}"
    others = count - len(cycle)
    like = f" (and {counted(others, 'rank')} like these)" if others else ""
    return [
        RehearsalFault("cyclic wait", ranks[0], count, f"{sentence}{like}; change the order of their calls")
    ]


class _Simulation:
    """Simulation of a step, with one state for each class of ranks."""

    def __init__(self, job: StepProgrammes, classes: RankClasses) -> None:
        self.job, self.classes = job, classes
        self.states = [
            _State(events, _numbers(events))
            for first in classes.firsts
            for events in [job.programmes[job.programme_of[first]]]
        ]
        self.relations = ClassRelations(job, classes)

    def run(self) -> None:
        """Advance each class until none can advance."""
        runnable = dict.fromkeys(range(len(self.states)))
        while runnable:
            number = next(iter(runnable))
            del runnable[number]
            state = self.states[number]
            while (event := state.current) is not None:
                if not state.started:
                    state.started = True
                    runnable |= dict.fromkeys(self._start(number, event))
                if next(self._missing_classes(number, event), None) is not None:
                    break
                state.index += 1
                state.started = False
            else:
                # The others need not wait for the started calls of this class any more.
                runnable |= dict.fromkeys(n for n, s in enumerate(self.states) if s.current is not None)
                state.started = True

    def cycle(self) -> list[int]:
        """Return classes that wait for each other, each for the next; [] if all programmes ended."""
        stuck = [number for number, state in enumerate(self.states) if state.current is not None]
        if not stuck:
            return []
        number, seen = stuck[0], list[int]()
        while number not in seen:
            seen.append(number)
            event = self.states[number].current
            assert event is not None
            number = next(each for each in self._missing_classes(number, event) if self.states[each].current)
        return seen[seen.index(number) :]

    def describe(self, number: int) -> str:
        """Return what a class waits for, in words."""
        state, event = self.states[number], self.states[number].current
        assert event is not None
        waiting = "the wait for " if event.operation == WAIT else ""
        call = state.events[event.call_index] if event.operation == WAIT else event
        if call.is_message:
            way, verb = ("to", "send") if call.operation == SEND else ("from", "receive")
            peer = self.job.place(self.relations.peer_rank(number, call))
            return f"{waiting}its {verb} of {call} along {call.group} {way} {peer}"
        return f"{waiting}{call} along {call.group}, call {state.numbers[self._index(state, event)]} there"

    def _index(self, state: _State, event: RehearsedCall) -> int:
        return event.call_index if event.operation == WAIT else state.index

    def _start(self, number: int, event: RehearsedCall) -> Iterator[int]:
        """Begin an event, and yield the classes that may advance because of it."""
        state = self.states[number]
        if event.operation == WAIT:
            call = state.events[event.call_index]
            if call.is_collective:
                state.waited.add((call.group, state.numbers[event.call_index]))
            # A wait advances all started calls of these ranks.
            for group in state.started_groups:
                yield from self.relations.members(number, group)
        elif event.is_message:
            state.posted[event.operation, _channel(event)] += 1
            yield self.relations.peer(number, event)
        else:
            state.entered[event.group] += 1
            if not event.blocking:
                state.started_groups.add(event.group)
            yield from self.relations.members(number, event.group)

    def _missing_classes(self, number: int, event: RehearsedCall) -> Iterator[int]:
        """Yield the classes that an event still needs in order to complete."""
        state = self.states[number]
        if event.operation == WAIT:
            call, call_number = state.events[event.call_index], state.numbers[event.call_index]
            if call.is_message:
                yield from self._unposted(number, call, call_number)
                return
            for other in self.relations.members(number, call.group):
                if not self._advances(other, call.group, call_number):
                    yield other
        elif not event.blocking:
            return
        elif event.is_message:
            yield from self._unposted(number, event, state.numbers[state.index])
        else:
            call_number = state.numbers[state.index]
            yield from (
                each
                for each in self.relations.members(number, event.group)
                if self.states[each].entered[event.group] < call_number
            )

    def _advances(self, number: int, group: str, call_number: int) -> bool:
        """Return True if a class has reached a started call and makes progress with it."""
        state, event = self.states[number], self.states[number].current
        if state.entered[group] < call_number:
            return False
        waiting = event is None or (event.operation == WAIT and state.started)
        return waiting or (group, call_number) in state.waited

    def _unposted(self, number: int, event: RehearsedCall, call_number: int) -> Iterator[int]:
        """Yield the class of the peer if it has not posted its part of a message."""
        peer = self.relations.peer(number, event)
        other = RECEIVE if event.operation == SEND else SEND
        size = self.job.groups[event.group].size
        channel = (event.group, -event.offset % size, event.tag)
        if self.states[peer].posted[other, channel] < call_number:
            yield peer


def _channel(event: RehearsedCall) -> Channel:
    return event.group, event.offset, event.tag


def _numbers(events: Programme) -> list[int]:
    """Return the number of each event among those of its group, or of its messages to one peer, from 1."""
    counts: defaultdict[object, int] = defaultdict(int)
    numbers = []
    for event in events:
        key: object = (event.operation, _channel(event)) if event.is_message else event.group
        counts[key] += event.operation != WAIT
        numbers.append(counts[key])
    return numbers
