"""Whether ranks come to the end of their programmes, or wait for each other in a circle.

Nothing is buffered: a send is complete when its receive is posted. A collective is complete when all of its
group have come to it. What was started goes on while ranks wait for something that was started, not while
they sit in a blocking collective (see Work): a wait for a started collective ends when every member has
waited for it, or is waiting. One rank of a class goes its way for all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpctrain.plan.rehearse.alike import Classes, ClassRelations
from hpctrain.plan.rehearse.fault import RehearsalFault
from hpctrain.plan.rehearse.programme import RECEIVE, SEND, WAIT, Programme, RehearsedCall, StepProgrammes
from hpctrain.text import counted

Channel = tuple[str, int, int]

_TOLD = 8  # of a circle's ranks


@dataclass
class _State:
    """How far the ranks of a class have come: calls `entered`, messages `posted`, groups in which something
    was `begun` and what was `waited` for. `numbers` are those of their events among their kind, from 1.
    """

    events: Programme
    numbers: list[int]
    at: int = 0
    entered: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    posted: dict[tuple[str, Channel], int] = field(default_factory=lambda: defaultdict(int))
    begun: set[str] = field(default_factory=set)
    waited: set[tuple[str, int]] = field(default_factory=set)
    started: bool = False

    @property
    def current(self) -> RehearsedCall | None:
        """What they are at; None at the end."""
        return self.events[self.at] if self.at < len(self.events) else None


def find_circles(job: StepProgrammes, classes: Classes) -> list[RehearsalFault]:
    """One fault for the ranks that wait for each other, none where all come to their end.

    What is sent and called is to fit by then, see `match`.
    """
    run = _ProgrammeRun(job, classes)
    run.go()
    circle = run.circle()
    if not circle:
        return []
    ranks = [classes.firsts[each] for each in circle]
    parts = [f"{job.place(rank)} is at {run.words(each)}" for rank, each in zip(ranks, circle, strict=True)]
    more = [f"and {len(parts) - _TOLD} more"] if len(parts) > _TOLD else []
    count = int(sum(classes.counts[each] for each in circle))
    told = "; ".join([*parts[:_TOLD], *more])
    sentence = f"{counted(len(circle), 'rank')} wait for each other in a cycle: {told}"
    others = count - len(circle)
    like = f" (and {counted(others, 'rank')} like these)" if others else ""
    return [
        RehearsalFault("cyclic wait", ranks[0], count, f"{sentence}{like}; change the order of their calls")
    ]


class _ProgrammeRun:
    """All classes doing their events, as far as they come."""

    def __init__(self, job: StepProgrammes, classes: Classes) -> None:
        self.job, self.classes = job, classes
        self.states = [
            _State(events, _numbers(events))
            for first in classes.firsts
            for events in [job.programmes[job.programme_of[first]]]
        ]
        self.relations = ClassRelations(job, classes)

    def go(self) -> None:
        """Let each go on until none can."""
        runnable = dict.fromkeys(range(len(self.states)))
        while runnable:
            number = next(iter(runnable))
            del runnable[number]
            state = self.states[number]
            while (event := state.current) is not None:
                if not state.started:
                    state.started = True
                    runnable |= dict.fromkeys(self._start(number, event))
                if next(self._lacking(number, event), None) is not None:
                    break
                state.at += 1
                state.started = False
            else:
                # Who waits for what this one has started need not wait for it any more.
                runnable |= dict.fromkeys(n for n, s in enumerate(self.states) if s.current is not None)
                state.started = True

    def circle(self) -> list[int]:
        """Classes that wait for each other, each for the next; none where all came to their end."""
        stuck = [number for number, state in enumerate(self.states) if state.current is not None]
        if not stuck:
            return []
        number, seen = stuck[0], list[int]()
        while number not in seen:
            seen.append(number)
            event = self.states[number].current
            assert event is not None
            number = next(each for each in self._lacking(number, event) if self.states[each].current)
        return seen[seen.index(number) :]

    def words(self, number: int) -> str:
        """What a class waits for."""
        state, event = self.states[number], self.states[number].current
        assert event is not None
        waiting = "the wait for " if event.operation == WAIT else ""
        meant = state.events[event.of] if event.operation == WAIT else event
        if meant.is_message:
            way, verb = ("to", "send") if meant.operation == SEND else ("from", "receive")
            peer = self.job.place(self.relations.peer_rank(number, meant))
            return f"{waiting}its {verb} of {meant} along {meant.group} {way} {peer}"
        return f"{waiting}{meant} along {meant.group}, call {state.numbers[self._index(state, event)]} there"

    def _index(self, state: _State, event: RehearsedCall) -> int:
        return event.of if event.operation == WAIT else state.at

    def _start(self, number: int, event: RehearsedCall) -> Iterator[int]:
        """Begin an event; who may go on by that."""
        state = self.states[number]
        if event.operation == WAIT:
            meant = state.events[event.of]
            if meant.is_collective:
                state.waited.add((meant.group, state.numbers[event.of]))
            # Being here helps all along that this one has started.
            for group in state.begun:
                yield from self.relations.members(number, group)
        elif event.is_message:
            state.posted[event.operation, _channel(event)] += 1
            yield self.relations.peer(number, event)
        else:
            state.entered[event.group] += 1
            if not event.blocking:
                state.begun.add(event.group)
            yield from self.relations.members(number, event.group)

    def _lacking(self, number: int, event: RehearsedCall) -> Iterator[int]:
        """Classes without whom the event cannot be completed."""
        state = self.states[number]
        if event.operation == WAIT:
            meant, place = state.events[event.of], state.numbers[event.of]
            if meant.is_message:
                yield from self._unposted(number, meant, place)
                return
            for other in self.relations.members(number, meant.group):
                if not self._helps(other, meant.group, place):
                    yield other
        elif not event.blocking:
            return
        elif event.is_message:
            yield from self._unposted(number, event, state.numbers[state.at])
        else:
            place = state.numbers[state.at]
            yield from (
                each
                for each in self.relations.members(number, event.group)
                if self.states[each].entered[event.group] < place
            )

    def _helps(self, number: int, group: str, place: int) -> bool:
        """Whether a class has come to a started call and goes on with it."""
        state, event = self.states[number], self.states[number].current
        if state.entered[group] < place:
            return False
        waiting = event is None or (event.operation == WAIT and state.started)
        return waiting or (group, place) in state.waited

    def _unposted(self, number: int, event: RehearsedCall, place: int) -> Iterator[int]:
        """The peer, where it has not posted its part of a message."""
        peer = self.relations.peer(number, event)
        other = RECEIVE if event.operation == SEND else SEND
        size = self.job.groups[event.group].size
        back = (event.group, -event.step % size, event.tag)
        if self.states[peer].posted[other, back] < place:
            yield peer


def _channel(event: RehearsedCall) -> Channel:
    return event.group, event.step, event.tag


def _numbers(events: Programme) -> list[int]:
    """Of each event, the how many-th it is of its group, or of its messages to one peer."""
    counts: defaultdict[object, int] = defaultdict(int)
    numbers = []
    for event in events:
        key: object = (event.operation, _channel(event)) if event.is_message else event.group
        counts[key] += event.operation != WAIT
        numbers.append(counts[key])
    return numbers
