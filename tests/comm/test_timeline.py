from __future__ import annotations

from time import perf_counter

import pytest
import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.ledger import Ledger, LedgerEntry
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.timeline import EVALUATION, PHASES, SCHEDULE, Timeline, TimelineSpan, clock_offset
from hpctrain.comm.work import StartedWork
from hpctrain.comm.world import World


def names(timeline: Timeline) -> list[tuple[int, str]]:
    return [(step, span.name) for step, span in timeline.spans()]


def test_only_the_newest_steps_are_kept() -> None:
    timeline = Timeline(2, 100)
    timeline.record("data", "early", 0.0, 1.0)
    for step in (5, 6, 7):
        timeline.begin_step(step)
        timeline.record_action(f"F{step}", perf_counter(), training=True)
    timeline.pause()
    timeline.record_action("late", perf_counter(), training=True)
    assert names(timeline) == [(6, "F6"), (7, "F7")]


def test_too_many_spans_are_counted_and_no_action_is_lost() -> None:
    timeline = Timeline(2, 3)
    for step in (1, 2):
        timeline.begin_step(step)
        for index in range(5):
            timeline.record("tensor", "all_reduce", index, index + 0.5)
        timeline.record_action("F0", 9.0, training=True)
        timeline.record_action("F1", 9.0, training=False)
    kept = [span.row for _, span in timeline.spans()]
    assert kept == ["tensor", "tensor", "tensor", SCHEDULE] * 2
    assert timeline.dropped == 2 * 3


def test_evaluation_has_a_row_of_its_own() -> None:
    timeline = Timeline(1, 10)
    timeline.begin_step(1)
    timeline.record_action("F0", perf_counter(), training=False)
    assert [span.row for _, span in timeline.spans()] == [EVALUATION]


def test_phases_are_recorded_once_however_often_they_are_set() -> None:
    ledger = Ledger()
    ledger.timeline = Timeline(1, 10)
    ledger.timeline.begin_step(1)
    for phase in ("forward", "forward", "backward", "other"):
        ledger.phase = phase
    spans = [span for _, span in ledger.timeline.spans()]
    assert [(span.row, span.name) for span in spans] == [
        (PHASES, "other"),
        (PHASES, "forward"),
        (PHASES, "backward"),
    ]
    assert spans[0].end == spans[1].start <= spans[1].end == spans[2].start
    assert set(ledger.phase_seconds) == {"other", "forward", "backward"}


def test_a_started_operation_lasts_until_it_is_seen_complete() -> None:
    class Later:
        def __init__(self) -> None:
            self.tests = 0

        def test(self) -> bool:
            self.tests += 1
            return self.tests == 2

        def wait(self) -> None:
            raise AssertionError

    span = TimelineSpan("data", "all_reduce", 1.0, 2.0)
    entry = LedgerEntry("data", "all_reduce", "other")
    work = StartedWork(torch.zeros(1), Later(), Call("barrier"), Ledger(), entry, span, set())
    assert not work.test()
    assert span.end == 2.0
    before = perf_counter()
    assert work.test()
    end = span.end
    assert before <= end <= perf_counter()
    assert 0 < span.call_seconds < perf_counter() - before + 1
    assert work.test()
    work.wait()
    assert span.end == end, "it does not go on when it is over"


@pytest.mark.mpi(min_size=2)
def test_every_call_of_every_group_is_recorded(world: World) -> None:
    mesh = Mesh(world, {"data": world.size})
    group, timeline = mesh.group("data"), Timeline(1, 100)
    timeline.begin_step(3)
    world.ledger.timeline = timeline
    try:
        group.all_reduce(torch.ones(8))
        work = group.start_all_gather(torch.ones(4))
        started = perf_counter()
        work.wait()
        group.barrier()
    finally:
        world.ledger.timeline = None
    group.barrier()
    found = [(step, span.row, span.name, span.bytes) for step, span in timeline.spans()]
    gathered = 4 * 4 * world.size
    assert found == [
        (3, "data", "all_reduce", 64),
        (3, "data", "all_gather", gathered),
        (3, "data", "barrier", 0),
    ]
    for _, span in timeline.spans():
        assert span.start <= span.end
        assert 0 < span.call_seconds <= (span.end - span.start) * 1.0001 + 1e-9
    gather = next(span for _, span in timeline.spans() if span.name == "all_gather")
    assert gather.start <= started <= gather.end


@pytest.mark.mpi(min_size=2)
def test_clocks_of_other_nodes_are_compared_by_messages(world: World) -> None:
    everyone, rank = world.everyone, world.rank

    def ahead() -> float:
        return perf_counter() + 1000.0 * rank

    began = perf_counter()
    found = clock_offset(everyone, node=rank, clock=ahead)
    took = perf_counter() - began
    assert abs(found - 1000.0 * rank) <= took
    assert clock_offset(everyone, node=0, clock=ahead) == 0.0, "ranks of one node have one clock"
