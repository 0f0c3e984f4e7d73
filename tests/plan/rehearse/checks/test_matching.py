"""The matcher: planted faults found and named, healthy jobs passed, and every mutation of random ones found.

Tests of plan/rehearse/programme.py, plan/rehearse/checks/rank_classes.py and
plan/rehearse/checks/host_deadlock.py too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.plan.rehearse.checks.matching import match_programmes
from hpctrain.plan.rehearse.checks.rank_classes import find_classes
from hpctrain.plan.rehearse.fault import RehearsalFault
from hpctrain.plan.rehearse.programme import (
    RECEIVE,
    SEND,
    WAIT,
    Membership,
    Programme,
    RehearsedCall,
    StepProgrammes,
)

Rows = Sequence[Sequence[int]]


def job_of(programmes: Sequence[Sequence[RehearsedCall]], **groups: Rows) -> StepProgrammes:
    """Each rank with a programme of its own."""
    ranks = len(programmes)
    every = {name: Membership(np.array(rows), ranks) for name, rows in groups.items()}
    return StepProgrammes([tuple(each) for each in programmes], np.arange(ranks), every)


def send(what: str, step: int = 1, size: int = 8, blocking: bool = True, **keys: int) -> RehearsedCall:
    return RehearsedCall(SEND, "pipeline", size, step, what=what, blocking=blocking, **keys)


def receive(what: str, step: int = -1, size: int = 8, blocking: bool = True, **keys: int) -> RehearsedCall:
    return RehearsedCall(RECEIVE, "pipeline", size, step % 2, what=what, blocking=blocking, **keys)


def total(size: int = 8, group: str = "all", blocking: bool = True, action: str = "") -> RehearsedCall:
    return RehearsedCall("all_reduce", group, size, what="sum", blocking=blocking, action=action)


def wait(index: int) -> RehearsedCall:
    return RehearsedCall(WAIT, call_index=index)


def kinds(job: StepProgrammes) -> list[str]:
    return [fault.kind for fault in match_programmes(job).faults]


def only(job: StepProgrammes) -> RehearsalFault:
    (fault,) = match_programmes(job).faults
    return fault


PAIR = [[0, 1]]


def test_healthy_messages() -> None:
    first = [send("F0"), send("F1", size=4), receive("B0", 1)]
    second = [receive("F0"), receive("F1", size=4), send("B0")]
    matched = match_programmes(job_of([first, second], pipeline=PAIR))
    assert matched.faults == ()
    assert (matched.ranks, matched.classes) == (2, 2)
    assert (matched.events, matched.messages, matched.bytes) == (6, 3, 20)


def test_a_missing_send() -> None:
    fault = only(
        job_of([[send("F0"), send("F2")], [receive("F0"), receive("F1"), receive("F2")]], pipeline=PAIR)
    )
    assert fault.kind == "missing send"
    assert fault.rank == 0
    assert "message 2 along pipeline from rank 0 to rank 1" in fault.sentence
    assert "send F1 of 8 bytes, too" in fault.sentence


def test_a_missing_receive() -> None:
    fault = only(job_of([[send("F0", blocking=False), wait(0)], []], pipeline=PAIR))
    assert (fault.kind, fault.rank) == ("missing receive", 1)
    assert kinds(job_of([[], [receive("F0")]], pipeline=PAIR)) == ["missing send"]


def test_a_swapped_order() -> None:
    """Of equal size: only what messages carry tells."""
    fault = only(job_of([[send("F1"), send("F0")], [receive("F0"), receive("F1")]], pipeline=PAIR))
    assert fault.kind == "swapped order"
    assert "is F1 of 8 bytes at the sender, but F0 of 8 bytes at the receiver (send F0" in fault.sentence
    both = [total(8), total(4)]
    assert kinds(job_of([both, both, both[::-1]], all=[[0, 1, 2]])) == ["swapped order"]


def test_a_wrong_size() -> None:
    fault = only(job_of([[send("F0", size=9)], [receive("F0")]], pipeline=PAIR))
    assert fault.kind == "wrong size"
    assert "9 bytes" in fault.sentence
    assert "send F0 of 8 bytes" in fault.sentence
    one = only(job_of([[total()], [total(12)], [total()]], all=[[0, 1, 2]]))
    assert (one.kind, one.rank) == ("wrong size", 1)


def test_a_cyclic_wait() -> None:
    """Both send before they receive, and nothing is buffered."""
    fault = only(job_of([[send("F0"), receive("B0", 1)], [send("B0"), receive("F0")]], pipeline=PAIR))
    assert fault.kind == "cyclic wait"
    assert "rank 0 is at its send of F0 of 8 bytes along pipeline to rank 1" in fault.sentence
    assert "rank 1 is at its send of B0" in fault.sentence
    started = [send("F0", blocking=False), receive("B0", 1), wait(0)]
    assert not kinds(job_of([started, [send("B0"), receive("F0")]], pipeline=PAIR))


def test_a_cyclic_wait_of_collectives_of_several_groups() -> None:
    a, b, c = (total(group=name) for name in "abc")
    groups = {"a": [[0, 1]], "b": [[1, 2]], "c": [[0, 2]]}
    assert not kinds(job_of([[a, c], [a, b], [b, c]], **groups))
    fault = only(job_of([[c, a], [a, b], [b, c]], **groups))
    assert fault.kind == "cyclic wait"
    assert fault.count == 3


def test_started_collectives_go_on_while_others_wait_for_them() -> None:
    """What one rank waits for before a blocking call, the others must wait for before it too."""
    begun, later = total(blocking=False), total(4)
    first, second = [begun, wait(0), later], [begun, later, wait(0)]
    assert not kinds(job_of([first, first], all=PAIR))
    assert not kinds(job_of([second, second], all=PAIR))
    assert kinds(job_of([first, second], all=PAIR)) == ["cyclic wait"]


def test_missing_and_other_calls() -> None:
    assert kinds(job_of([[total(), total()], [total()]], all=PAIR)) == ["missing call"]
    other = replace(total(), operation="broadcast")
    assert kinds(job_of([[total()], [total()], [other]], all=[[0, 1, 2]])) == ["other operation"]
    assert kinds(job_of([[total(action="F0")], [total(action="F1")]], all=PAIR)) == ["other operation"]


def test_pieces_of_an_exchange() -> None:
    def exchange(sent: tuple[int, int], received: tuple[int, int]) -> list[RehearsedCall]:
        return [RehearsedCall("all_to_all", "all", 4 * sum(sent), sent=sent, received=received)]

    assert not kinds(job_of([exchange((1, 2), (1, 5)), exchange((5, 3), (2, 3))], all=PAIR))
    fault = only(job_of([exchange((1, 2), (1, 5)), exchange((5, 3), (4, 3))], all=PAIR))
    assert fault.kind == "wrong size"
    assert "rank 0 sends 2 elements to rank 1, which receives 4" in fault.sentence


def ring(size: int, odd: int | None = None) -> StepProgrammes:
    """Each passes on to the next one; with `odd` that rank does so late, and in another class."""
    begun = (
        RehearsedCall(SEND, "ring", 8, 1, blocking=False),
        RehearsedCall(RECEIVE, "ring", 8, size - 1),
        wait(0),
    )
    programme_of = np.zeros(size, dtype=np.int64)
    late = (begun[1], replace(begun[0], blocking=True))
    if odd is not None:
        programme_of[odd] = 1
    return StepProgrammes([begun, late], programme_of, {"ring": Membership(np.arange(size)[None], size)})


def test_one_stands_for_all_that_are_alike() -> None:
    assert match_programmes(ring(12)).classes == 1
    assert not kinds(ring(12))
    # Every rank is so many places from the odd one.
    assert match_programmes(ring(12, 5)).classes == 12
    assert not kinds(ring(12, 5))
    blocking = tuple(replace(event, blocking=True) for event in ring(12).programmes[0][:2])
    stuck = StepProgrammes([blocking], np.zeros(12, dtype=np.int64), ring(12).groups)
    assert kinds(stuck) == ["cyclic wait"]
    assert only(stuck).count == 12


def test_classes_are_told_apart_by_those_around_them() -> None:
    """Of a grid of 4 x 3 one rank differs: its row, its column, and all others are classes."""
    rows, event = np.arange(12).reshape(4, 3), total(group="row")
    groups = {"row": Membership(rows, 12), "column": Membership(rows.T, 12)}
    programme_of = np.zeros(12, dtype=np.int64)
    programme_of[4] = 1
    both = (event, total(group="column"))
    classes = find_classes(StepProgrammes([both, (*both, event)], programme_of, groups))
    assert sorted(classes.counts.tolist()) == [1, 2, 3, 6]


# Random healthy jobs of few ranks, made of one order of what all of them do together, and mutations of them.


def random_job(random: random.Random, ranks: int, length: int) -> list[list[RehearsedCall]]:
    """Programmes of ranks on a "pipeline" of all and groups "even" and "odd" of some: what is done at once by
    all that take part, in some order, never waits in a cycle.
    """
    programmes: list[list[RehearsedCall]] = [[] for _ in range(ranks)]
    waits: list[list[int]] = [[] for _ in range(ranks)]
    for number in range(length):
        blocking = random.random() < 0.5
        if random.random() < 0.6:
            source, target = random.sample(range(ranks), 2)
            size, tag = random.choice([4, 8]), random.choice([0, 1])
            for rank, operation, peer in ((source, SEND, target), (target, RECEIVE, source)):
                step, at_once = (peer - rank) % ranks, blocking or random.random() < 0.5
                event = RehearsedCall(operation, "all", size, step, tag, f"m{number}", blocking=at_once)
                if not at_once:
                    waits[rank].append(len(programmes[rank]))
                programmes[rank].append(event)
        else:
            group = random.choice(["all", "some"])
            for rank in range(ranks) if group == "all" else range(0, ranks, 2):
                programmes[rank].append(
                    RehearsedCall("all_reduce", group, 4 + 4 * (number % 2), what=f"c{number}")
                )
    for rank in range(ranks):
        programmes[rank] += [wait(index) for index in waits[rank]]
    return programmes


def built(programmes: Sequence[Sequence[RehearsedCall]]) -> StepProgrammes:
    ranks = len(programmes)
    return job_of(programmes, all=[list(range(ranks))], some=[list(range(0, ranks, 2))])


def members(group: str, ranks: int) -> list[int]:
    return list(range(0, ranks, 1 if group == "all" else 2))


def by_brute_force(programmes: Sequence[Sequence[RehearsedCall]]) -> bool:
    """Whether every rank comes to its end, step by step, with everything it meets fitting: ranks one by one
    and events one by one, without classes or channels.
    """
    ranks = len(programmes)
    at, met = [0] * ranks, [set[int]() for _ in range(ranks)]  # events that are complete
    posted: list[set[int]] = [set() for _ in range(ranks)]

    def partners(rank: int, index: int) -> list[tuple[int, int]] | None:
        """The events that this one meets; None where one of them is not posted, or another one is."""
        event = programmes[rank][index]
        if event.is_message:
            peer = (rank + event.offset) % ranks
            number = sum(
                (e.operation, e.offset, e.tag) == (event.operation, event.offset, event.tag)
                for e in programmes[rank][:index]
            )
            other = [
                i
                for i, e in enumerate(programmes[peer])
                if e.is_message and e.operation != event.operation
                if (peer + e.offset) % ranks == rank and e.tag == event.tag
            ]
            return [(peer, other[number])] if number < len(other) and other[number] in posted[peer] else None
        number = sum(e.is_collective and e.group == event.group for e in programmes[rank][:index])
        found = []
        for peer in members(event.group, ranks):
            own = [i for i, e in enumerate(programmes[peer]) if e.is_collective and e.group == event.group]
            if number >= len(own) or own[number] not in posted[peer]:
                return None
            found.append((peer, own[number]))
        return found

    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while at[rank] < len(programmes[rank]):
                event = programmes[rank][at[rank]]
                index = event.call_index if event.operation == WAIT else at[rank]
                if event.operation != WAIT and at[rank] not in posted[rank]:
                    posted[rank].add(at[rank])
                    moved = True
                meant = programmes[rank][index]
                if event.operation == WAIT or event.blocking:
                    others = partners(rank, index)
                    if others is None:
                        break
                    if any(
                        (programmes[p][i].what, programmes[p][i].bytes) != (meant.what, meant.bytes)
                        for p, i in others
                    ):
                        return False
                    met[rank].add(index)
                at[rank] += 1
                moved = True
    return all(at[rank] == len(programmes[rank]) for rank in range(ranks)) and all(
        index in met[rank]
        for rank in range(ranks)
        for index, event in enumerate(programmes[rank])
        if event.operation != WAIT
    )


def mutated(random: random.Random, programmes: list[list[RehearsedCall]]) -> list[list[RehearsedCall]]:
    """With one event gone, changed, or at the place of another one of its rank."""
    result = [list(each) for each in programmes]
    rank = random.choice([r for r, each in enumerate(result) if each])
    events = [i for i, e in enumerate(result[rank]) if e.operation != WAIT]
    index = random.choice(events)
    how = random.choice(["gone", "larger", "swapped"])
    event = result[rank][index]
    if how == "larger":
        result[rank][index] = replace(event, bytes=event.bytes + 1)
    elif how == "swapped":
        other = random.choice(events)
        result[rank][index], result[rank][other] = result[rank][other], result[rank][index]
        # Waits are for the same events at their new places.
        places = {index: other, other: index}
        result[rank] = [
            replace(e, call_index=places.get(e.call_index, e.call_index)) if e.operation == WAIT else e
            for e in result[rank]
        ]
    else:
        result[rank] = [
            replace(e, call_index=e.call_index - (e.call_index > index)) if e.operation == WAIT else e
            for i, e in enumerate(result[rank])
            if i != index and not (e.operation == WAIT and e.call_index == index)
        ]
    return result


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), ranks=st.integers(2, 5), length=st.integers(1, 12))
def test_random_jobs_are_healthy_and_mutations_are_found(seed: int, ranks: int, length: int) -> None:
    source = random.Random(seed)
    programmes = random_job(source, ranks, length)
    assert by_brute_force(programmes)
    assert not match_programmes(built(programmes)).faults
    for _ in range(4):
        other = mutated(source, programmes)
        assert bool(match_programmes(built(other)).faults) != by_brute_force(other)


def test_faults_of_alike_ranks_are_one_with_their_number() -> None:
    """Eight pipelines of two: each first stage forgets a message."""
    first: Programme = (send("F0"),)
    second: Programme = (receive("F0"), receive("F1"))
    rows = np.arange(16).reshape(2, 8).T
    job = StepProgrammes([first, second], np.repeat([0, 1], 8), {"pipeline": Membership(rows, 16)})
    fault = only(job)
    assert (fault.kind, fault.count) == ("missing send", 8)
    assert "rank 0 and 7 others like it" in fault.sentence


@pytest.mark.parametrize("seed", range(5))
def test_copies_of_a_job_are_as_one(seed: int) -> None:
    """The same ranks side by side, four times: as many classes, four times the events."""
    programmes = random_job(random.Random(seed), 4, 10)
    one = match_programmes(built(programmes))
    rows = np.arange(16).reshape(4, 4)
    groups = {"all": Membership(rows, 16), "some": Membership(rows[:, ::2], 16)}
    many = match_programmes(
        StepProgrammes([tuple(each) for each in programmes], np.tile(np.arange(4), 4), groups)
    )
    assert (many.classes, many.events) == (one.classes, 4 * one.events)
    assert not many.faults
