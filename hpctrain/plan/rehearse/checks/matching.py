"""Matching of the programmes of all ranks: sends with receives, and the collective calls of each group.

MPI keeps the order of messages with one tag between two ranks, so the n-th send matches the n-th receive. The
n-th call of a group on one rank matches the n-th call on all its ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from hpctrain.plan.rehearse.checks.host_deadlock import find_host_deadlock
from hpctrain.plan.rehearse.checks.issue_order import find_order_faults
from hpctrain.plan.rehearse.checks.rank_classes import RankClasses, find_classes
from hpctrain.plan.rehearse.checks.stream_deadlock import find_stream_deadlock, without_tags
from hpctrain.plan.rehearse.fault import Kind, RehearsalFault
from hpctrain.plan.rehearse.programme import RECEIVE, SEND, WAIT, Numbers, RehearsedCall, StepProgrammes
from hpctrain.text import counted

Channel = tuple[str, int, int]
"""Group, step to the peer, and tag of messages."""


@dataclass(frozen=True)
class MatchResult:
    """Result of matching.

    Attributes:
        ranks: Number of ranks.
        classes: Number of classes of ranks that behave alike.
        events: Number of calls of all ranks.
        messages: Number of messages among them.
        bytes: Payload of sent messages and collectives of all ranks.
        faults: Faults that were found.
    """

    ranks: int
    classes: int
    events: int
    messages: int
    bytes: int
    faults: tuple[RehearsalFault, ...]


def match_programmes(job: StepProgrammes, on_streams: bool = False) -> MatchResult:
    """Match the programmes of all ranks.

    Args:
        job: The programmes.
        on_streams: True if NCCL carries the calls: then messages have no tags, and calls wait for each other
            on streams of GPUs instead of on the host.
    """
    job = over_communicators(without_tags(job) if on_streams else job)
    classes = find_classes(job)
    faults = [*_message_faults(job, classes), *_collective_faults(job, classes)]
    if not faults:  # ranks that wait for a missing call would only repeat its fault
        faults = (find_stream_deadlock if on_streams else find_host_deadlock)(job, classes)
    if not faults and on_streams:
        faults = [*find_order_faults(job, classes)]
    programmes = [job.programmes[job.programme_of[first]] for first in classes.firsts]
    counts = classes.counts.tolist()

    def over_all(of_event: Sequence[int]) -> int:
        return sum(number * count for number, count in zip(of_event, counts, strict=True))

    return MatchResult(
        job.ranks,
        len(classes.firsts),
        over_all([sum(e.operation != WAIT for e in events) for events in programmes]),
        over_all([sum(e.operation == SEND for e in events) for events in programmes]),
        over_all([sum(e.bytes for e in events if e.operation != RECEIVE) for events in programmes]),
        tuple(faults),
    )


def over_communicators(job: StepProgrammes) -> StepProgrammes:
    """Return the job with calls of groups that share communicators under one name.

    A group along several axes of which only one has several ranks uses the communicators of the group along
    this axis (`Mesh`).
    """
    names: dict[str, str] = {}
    for name, group in job.groups.items():
        for axis in name.split(" x ") if " x " in name else ():
            other = job.groups.get(axis)
            if other is not None and np.array_equal(other.rows, group.rows):
                names[name] = axis
    if not names:
        return job
    programmes = [
        tuple(replace(e, group=names[e.group]) if e.group in names else e for e in events)
        for events in job.programmes
    ]
    return replace(job, programmes=programmes)


def _message_faults(job: StepProgrammes, classes: RankClasses) -> Iterator[RehearsalFault]:
    """Yield the first fault of the messages between each two classes."""
    sends, receives = (
        [_channels(job.programmes[job.programme_of[first]], operation) for first in classes.firsts]
        for operation in (SEND, RECEIVE)
    )
    for number, first in enumerate(classes.firsts):
        for (group, step, tag), sent in sends[number].items():
            membership = job.groups[group]
            peer = int(membership.peers(np.array([first]), step)[0])
            back = (group, -step % membership.size, tag)
            received = receives[classes.of_rank[peer]].get(back, [])
            yield from _channel_faults(job, classes, (first, peer), group, sent, received)
        for (group, step, tag), received in receives[number].items():
            membership = job.groups[group]
            peer = int(membership.peers(np.array([first]), step)[0])
            back = (group, -step % membership.size, tag)
            if back not in sends[classes.of_rank[peer]]:
                yield from _channel_faults(job, classes, (peer, first), group, [], received)


def _channels(programme: Sequence[RehearsedCall], operation: str) -> dict[Channel, list[RehearsedCall]]:
    by_channel: defaultdict[Channel, list[RehearsedCall]] = defaultdict(list)
    for event in programme:
        if event.operation == operation:
            by_channel[event.group, event.offset, event.tag].append(event)
    return by_channel


def _channel_faults(
    job: StepProgrammes,
    classes: RankClasses,
    ranks: tuple[int, int],
    group: str,
    sent: Sequence[RehearsedCall],
    received: Sequence[RehearsedCall],
) -> Iterator[RehearsalFault]:
    """Yield the first difference between the sends of one rank and the receives of another."""
    sender, receiver = ranks
    number = _difference(sent, received)
    if number is None:
        return
    there, here = _event_at(sent, number), _event_at(received, number)
    who, whom = _describe(job, classes, sender), _describe(job, classes, receiver)
    message = f"message {number + 1} along {group} from {who} to {whom}"
    difference = f"is {there or 'nothing'} at the sender, but {here or 'nothing'} at the receiver"
    kind: Kind
    if len(sent) < len(received):
        kind, rank = "missing send", sender
        correct = f"{counted(len(received), 'message')} received, {len(sent)} sent; send {here}, too"
    elif len(sent) > len(received):
        kind, rank = "missing receive", receiver
        correct = f"{counted(len(sent), 'message')} sent, {len(received)} received; receive {there}, too"
    elif _are_reordered(sent, received):
        kind, rank, correct = "swapped order", sender, f"send {here} first"
    else:
        assert there is not None and here is not None
        kind, rank = "wrong size" if there.content == here.content else "other operation", sender
        correct = f"send {here}"
    count = int(classes.counts[classes.of_rank[rank]])
    yield RehearsalFault(kind, rank, count, f"{message} {difference} ({correct})")


def _collective_faults(job: StepProgrammes, classes: RankClasses) -> Iterator[RehearsalFault]:
    """Yield the first fault of the calls of each class in its groups, compared with the most common calls."""
    calls = [_calls(job.programmes[job.programme_of[first]]) for first in classes.firsts]
    for group in sorted({group for of_class in calls for group in of_class}):
        membership = job.groups[group]
        of_rows = classes.of_rank[membership.rows]
        kinds, firsts = np.unique(np.sort(of_rows, axis=1), axis=0, return_index=True)
        known: dict[object, int] = {}  # many classes call the same
        called = [of_class.get(group, []) for of_class in calls]
        numbers = [known.setdefault(_sizes(events), len(known)) for events in called]
        for kind, row in zip(kinds, firsts, strict=True):
            here, counts = np.unique(kind, return_counts=True)
            alike = Counter[int]()
            for each, count in zip(here.tolist(), counts.tolist(), strict=True):
                alike[numbers[each]] += count
            majority = max(here.tolist(), key=lambda each: (alike[numbers[each]], len(called[each]), -each))
            members = membership.rows[row]
            reference = int(members[np.flatnonzero(of_rows[row] == majority)[0]])
            for each in here.tolist():
                if numbers[each] == numbers[majority]:
                    continue
                rank = int(members[np.flatnonzero(of_rows[row] == each)[0]])
                yield from _group_faults(
                    job, classes, group, (reference, called[majority]), (rank, called[each])
                )
        uneven = any(event.sent for of_class in calls for event in of_class.get(group, []))
        for row in np.unique(of_rows, axis=0, return_index=True)[1] if uneven else ():
            yield from _exchange_faults(job, classes, group, membership.rows[row], calls)


def _calls(programme: Sequence[RehearsedCall]) -> dict[str, list[RehearsedCall]]:
    by_group: defaultdict[str, list[RehearsedCall]] = defaultdict(list)
    for event in programme:
        if event.is_collective:
            by_group[event.group].append(event)
    return by_group


def _group_faults(
    job: StepProgrammes,
    classes: RankClasses,
    group: str,
    majority: tuple[int, Sequence[RehearsedCall]],
    other: tuple[int, Sequence[RehearsedCall]],
) -> Iterator[RehearsalFault]:
    """Yield the first difference between the calls of two ranks of a group."""
    number = _difference(majority[1], other[1])
    if number is None:
        return
    there, here = _event_at(majority[1], number), _event_at(other[1], number)
    call = f"call {number + 1} of {group}"
    difference = f"is {here or 'missing'} on {_describe(job, classes, other[0])}"
    correct = f"and {there} on {_describe(job, classes, majority[0])}"
    kind: Kind = "other operation"
    if len(other[1]) < len(majority[1]):
        kind = "missing call"
    elif _are_reordered(majority[1], other[1]):
        kind = "swapped order"
    elif there is not None and here is not None and there.content == here.content:
        kind = "wrong size"
    count = int(classes.counts[classes.of_rank[other[0]]])
    yield RehearsalFault(
        kind,
        other[0],
        count,
        f"{call} {difference}, {correct}; all ranks of a group must make the same calls",
    )


def _exchange_faults(
    job: StepProgrammes,
    classes: RankClasses,
    group: str,
    members: Numbers,
    calls: Sequence[dict[str, list[RehearsedCall]]],
) -> Iterator[RehearsalFault]:
    """Yield the first exchange in which a rank sends another number of elements than its peer receives."""
    of_members = [calls[classes.of_rank[rank]].get(group, []) for rank in members]
    for number, together in enumerate(zip(*of_members, strict=False)):
        if any(event.sent is None or event.received is None for event in together):
            continue
        sent, received = np.array([e.sent for e in together]), np.array([e.received for e in together])
        wrong = np.argwhere(sent != received.T)
        if len(wrong):
            source, target = (int(each) for each in wrong[0])
            sender, receiver = int(members[source]), int(members[target])
            count = int(classes.counts[classes.of_rank[sender]])
            yield RehearsalFault(
                "wrong size",
                sender,
                count,
                f"call {number + 1} of {group}, {together[source]}: {_describe(job, classes, sender)} sends "
                f"{sent[source, target]} elements to {_describe(job, classes, receiver)}, which receives "
                f"{received[target, source]}",
            )
            return


def _difference(one: Sequence[RehearsedCall], other: Sequence[RehearsedCall]) -> int | None:
    """Return the first index at which two lists of events do not match; None if they match."""
    for number, (there, here) in enumerate(zip_longest(one, other)):
        if there is None or here is None or there.content != here.content:
            return number
        if there.bytes != here.bytes and there.sent is None:
            return number
    return None


def _are_reordered(one: Sequence[RehearsedCall], other: Sequence[RehearsedCall]) -> bool:
    """Return True if both lists have the same events, maybe in another order."""
    return Counter(_sizes(one)) == Counter(_sizes(other))


def _sizes(events: Sequence[RehearsedCall]) -> tuple[object, ...]:
    """Return what must be equal in matching lists of events."""
    return tuple((event.content, event.bytes if event.sent is None else None) for event in events)


def _event_at(events: Sequence[RehearsedCall], number: int) -> RehearsedCall | None:
    return events[number] if number < len(events) else None


def _describe(job: StepProgrammes, classes: RankClasses, rank: int) -> str:
    """Return a rank with its coordinates, and the number of ranks that behave like it."""
    others = int(classes.counts[classes.of_rank[rank]]) - 1
    return job.place(rank) + (f" and {counted(others, 'other')} like it" if others else "")
