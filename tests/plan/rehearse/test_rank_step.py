"""Programmes of a step: event by event what ranks of a run call, and the same told for many as for each.

Tests of plan/rehearse/call_recorder.py, plan/rehearse/recorded_operations.py and
plan/rehearse/audit_messages.py too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hpctrain.audit.audited_transport import AuditedTransport
from hpctrain.audit.message_audit import MessageAudit
from hpctrain.comm.calls import Call, GroupCalls
from hpctrain.comm.work import StartedWork
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.plan.rehearse.programme import AUDIT, WAIT, Programme
from hpctrain.plan.rehearse.rank_programmes import RankProgrammes
from tests.engines import LLAMA, small_deck, trainer

VOCABULARY = 61

Told = tuple[str, str, int, int, str, bool]


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Told]]:
    """What this rank calls within: operation, group, bytes, places to the peer, type, whether it waits; and
    of what it starts the first wait, with the place of the call in place of the bytes.
    """
    told: list[Told] = []
    begun: dict[int, tuple[Call, int]] = {}
    enter, wait = GroupCalls.enter, StartedWork.wait

    def heard(self: GroupCalls, call: Call) -> None:
        rank = rank_in(self)
        step = (call.peer - rank) % len(self.ranks) if call.peer >= 0 else 0
        form = "" if call.dtype is None else str(call.dtype).removeprefix("torch.")
        if not call.blocking:
            begun[id(call)] = call, len(told)
        told.append((call.operation, self.name, call.bytes, step, form, call.blocking))
        enter(self, call)

    def waited(self: StartedWork[Any]) -> Any:
        if id(self._call) in begun:
            told.append((WAIT, "", begun.pop(id(self._call))[1], 0, "", True))
        return wait(self)

    def rank_in(group: GroupCalls) -> int:
        from mpi4py import MPI

        return group.ranks.index(MPI.COMM_WORLD.rank)

    with monkeypatch.context() as patched:
        patched.setattr(GroupCalls, "enter", heard)
        patched.setattr(StartedWork, "wait", waited)
        yield told


def planned(programme: Programme) -> list[Told]:
    """The same of a programme, whose groups have longer names."""

    def name(group: str) -> str:
        across, _, whole = group.rpartition(" of ")
        return "world" if group == "agreements" else across or whole.partition("/")[0]

    return [
        (e.operation, name(e.group), e.bytes, e.offset, e.format, e.blocking)
        if e.operation != WAIT
        else (WAIT, "", e.call_index, 0, "", True)
        for e in programme
    ]


LOCAL = ("layout.tensor=2", "layout.sequence_parallel=true")
MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=32", "model.experts.per_token=4")
LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    2: [
        (),
        ("layout.zero=1", "precision.compute=bf16", "run.noise_scale_steps=5", *LLAMA),
        ("layout.zero=2", "precision.gradients=compute", "precision.compute=bf16"),
        ("layout.zero=3", "memory.recompute=full"),
        ("layout.zero=3", "memory.accumulate=sliced", "communication.transport=mpi"),
        ("layout.tensor=2", *LLAMA, "model.tied=true"),
        (*LOCAL, "memory.recompute=selective"),
        (*LOCAL, "precision.compute=fp8", "precision.fp8=tensor"),
        ("layout.context=2", *LLAMA),
        ("layout.context=2", "layout.context_form=all_to_all"),
        ("layout.pipeline=2", "model.tied=true"),
        ("layout.pipeline=2", "layout.schedule=zb-h1", "batch.global_size=16", "batch.micro_size=1"),
        ("layout.pipeline=2", *LLAMA, "model.mtp_layers=1", "model.tied=false"),
        ("layout.pipeline=2", 'model.frozen=["embedding.*", "blocks.0.*"]'),
        ("communication.compress=powersgd",),
        ("layout.local_steps.replicas=2", "layout.local_steps.steps=2", "layout.local_steps.outer=diloco"),
        ("optimizer.name=muon", "layout.zero=3"),
        ("optimizer.name=muon", "model.layers=3"),
        ("optimizer.name=muon", "layout.tensor=2", "model.layers=3"),
        ("optimizer.name=adam-mini", "layout.tensor=2"),
        (*MIXTURE, "layout.expert=2"),
        (*MIXTURE, "layout.expert=2", "model.experts.count=6", "model.experts.balance=bias"),
    ],
    4: [
        ("layout.tensor=2", "layout.zero=1", "layout.zero_group=1"),
        ("layout.pipeline=2", "layout.chunks=2", "layout.schedule=interleaved", "model.layers=4"),
        ("layout.pipeline=2", "layout.tensor=2", "batch.global_size=32", "layout.zero=2"),
        ("layout.pipeline=2", "layout.context=2", "layout.zero=3", *LLAMA),
        (*MIXTURE, *LOCAL, "layout.expert=2", "layout.expert_tensor=2"),
        (*MIXTURE, "layout.pipeline=2", "layout.expert=2", "model.experts.balance_loss=0.01"),
        (
            *MIXTURE,
            "layout.expert=4",
            "model.experts.count=12",
            "model.experts.capacity=1.5",
            "batch.micro_size=1",
        ),
        ("optimizer.name=muon", "layout.tensor=2", "model.layers=3"),
        ("optimizer.name=muon", "layout.tensor=2", "layout.zero=1", "precision.compute=bf16"),
    ],
}


def of_each(deck: Deck, rank: int, ranks: int) -> Programme:
    found = RankProgrammes(deck, ranks, VOCABULARY, ranks)
    return found.programme(*divmod(rank, found.of_stage), found.kinds[rank // found.of_stage])


def with_waits(told: list[Told]) -> list[Told]:
    """Calls, and waits by the number of their call; but for sends: a run may find them done without one."""
    numbers, found = dict[int, int](), list[Told]()
    for place, event in enumerate(told):
        if event[0] != WAIT:
            numbers[place] = len(numbers)
        elif told[event[2]][0] == "send":
            continue
        found.append(event if event[0] != WAIT else (*event[:2], numbers[event[2]], *event[3:]))
    return found


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("number", range(21))
def test_a_rank_of_a_run_does_what_its_programme_says(
    world: World, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = LAYOUTS.get(world.size, [])
    if number >= len(layouts):
        pytest.skip("no such layout")
    deck = small_deck(*layouts[number])
    run = trainer(world, deck)
    # The second step gathers ahead; replicas meet after every second one.
    run.train(3)
    with listening(monkeypatch) as told:
        run.train(1)
    programme = planned(of_each(deck, world.rank, world.size))
    if deck.model.experts:
        # How many rows go where is the routers' choice.
        told, programme = (
            [e if e[0] == WAIT else (*e[:2], 0, *e[3:]) for e in each] for each in (told, programme)
        )
    assert with_waits(programme) == with_waits(told)


AUDITED: list[tuple[str, tuple[str, ...]]] = [
    ("cheap", ("layout.zero=2",)),
    ("full", ("layout.pipeline=2", "model.tied=true", "batch.global_size=16", "batch.micro_size=1")),
    ("full", ("layout.context=2", "layout.zero=3", *LLAMA)),
    ("full", (*MIXTURE, "layout.expert=2", "layout.zero=1")),
]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("number", range(len(AUDITED)))
def test_the_audit_of_a_run_sends_what_its_programme_says(
    world: World, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums in their order, and the number of records of each communicator in both exchanges."""
    depth, keys = AUDITED[number]
    deck = small_deck(*keys, f"stability.corruption={depth}")
    run = trainer(world, deck)
    run.train(3)
    checksums: list[tuple[str, str]] = []
    exchanges: list[list[int]] = []
    message, collect = AuditedTransport._message, MessageAudit.collect_faults

    def heard(self: AuditedTransport, call: Call, phase: str) -> Any:
        checksums.append((call.operation, AUDIT + call.group.name))
        return message(self, call, phase)

    def collected(self: MessageAudit) -> Any:
        numbers = [len(log._records) for log in self.logs]
        pairs = zip(numbers[::2], numbers[1::2], strict=True)  # reductions and transfers
        exchanges.append(sorted(filter(None, map(sum, pairs))))
        return collect(self)

    with monkeypatch.context() as patched:
        patched.setattr(AuditedTransport, "_message", heard)
        patched.setattr(MessageAudit, "collect_faults", collected)
        run.train(1)
    programme = [e for e in of_each(deck, world.rank, world.size) if e.group.startswith(AUDIT)]
    assert checksums == [(e.operation, e.group) for e in programme if e.is_message]
    assert bool(checksums) == (number in {1, 2})
    planned_exchanges = [
        sorted(int(e.what.split()[1]) for e in programme if e.is_collective and e.action == action)
        for action in ("agree", "check")
    ]
    assert exchanges == planned_exchanges
    assert exchanges[0]
