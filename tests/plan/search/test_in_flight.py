"""What stages hold before a backward, and when all gradients are there at once, against schedules.

Tests of plan/search/in_flight.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hpctrain.pipeline import v_schedule
from hpctrain.pipeline.action import Action, Schedule, accumulation
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.simulate import StageTimes
from hpctrain.pipeline.v_schedule import LIMITS
from hpctrain.plan.search.in_flight import CompleteGradients, InFlight, complete_gradients, in_flight_peaks
from hpctrain.plan.search.search_space import ORDERED

NAMES = (*ORDERED, "gpipe")


def made(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    if stages == 1:
        return accumulation(micro_batches)
    return generate_schedule(name, stages, micro_batches, chunks if name == "interleaved" else None)


def instants(actions: Sequence[Action], chunks: int) -> Iterator[InFlight]:
    """Of a stage before each of its backwards."""
    waiting, deferred = Counter[int](), Counter[int]()
    for action in actions:
        if action.kind in "BI":
            both = (tuple(each[chunk] for chunk in range(chunks)) for each in (waiting, deferred))
            yield InFlight(*both, action.chunk, action.kind == "I")
        waiting[action.chunk] += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        deferred[action.chunk] += {"F": 0, "B": 0, "I": 1, "W": -1}[action.kind]


cases = {
    "name": some.sampled_from(NAMES),
    "stages": some.integers(1, 7),
    "micro_batches": some.integers(1, 24),
    "chunks": some.integers(2, 4),
}


@settings(max_examples=150, deadline=None)
@given(**cases)
def test_moments_are_those_of_the_schedule_and_none_holds_more(
    name: str, stages: int, micro_batches: int, chunks: int
) -> None:
    if name == "interleaved":
        micro_batches = stages * (1 + micro_batches % 4)
    chunks = 1 if stages == 1 else {"interleaved": chunks, "dualpipe-v": 2}.get(name, 1)
    for stage, actions in enumerate(made(name, stages, micro_batches, chunks).stages):
        every = list(instants(actions, chunks))
        told = list(in_flight_peaks(name, stages, micro_batches, chunks, stage))
        assert set(told) <= set(every)
        for of_deferred in (0.0, 0.5, 1.0):
            held = [sum(each.waiting) + of_deferred * sum(each.deferred) for each in told]
            assert max(held) == max(sum(each.waiting) + of_deferred * sum(each.deferred) for each in every)


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
def test_of_other_schedules_one_micro_batch_is_in_all_parts(name: str) -> None:
    for stage, actions in enumerate(generate_schedule(name, 4, 8).stages):
        ((waiting, deferred, chunk, split),) = in_flight_peaks(name, 4, 8, 2, stage)
        first = next(iter(instants(actions, 2)))
        assert (waiting, deferred, chunk, split) == ((1, 1), (0, 0), first.chunk, None)
        assert all(one <= other for one, other in zip(waiting, first.waiting, strict=True))


@settings(max_examples=150, deadline=None)
@given(**cases)
def test_all_gradients_are_there_at_once_where_that_is_said(
    name: str, stages: int, micro_batches: int, chunks: int
) -> None:
    """The head's begin in forward, those of matrices with weight gradients, others with any backward."""
    if name == "interleaved":
        micro_batches = stages * (1 + micro_batches % 4)
    which = complete_gradients(name, stages, micro_batches)
    if which != "none":
        expect_opened(made(name, stages, micro_batches, chunks), which)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("stages", [2, 3, 5, 8])
def test_so_they_are_in_orders_that_are_looked_for(
    name: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(v_schedule, "_MAX_PLACED_ACTIONS", 10_000)
    random, many = Random(stages), 2 * LIMITS[name](stages)
    assert complete_gradients(name, stages, many + 1) == "all"
    for micro_batches in range(max(2, many // 2), many + 2):
        times = ([random.uniform(0.5, 2.0) for _ in range(2 * stages)] for _ in range(3))
        if complete_gradients(name, stages, micro_batches) == "all":
            expect_opened(generate_schedule(name, stages, micro_batches, times=StageTimes(*times)), "all")


def expect_opened(schedule: Schedule, which: CompleteGradients) -> None:
    for stage, actions in enumerate(schedule.stages):
        begun, final = 0, len(actions)
        for chunk in range(schedule.chunks):
            forward, weights, inputs = (
                [at for at, each in enumerate(actions) if each.chunk == chunk and each.kind in kinds]
                for kinds in ("F", "BW", "BI")
            )
            if which == "blocks":
                begun, final = max(begun, inputs[0]), min(final, weights[-1])
                continue
            predicts = schedule.part(stage, chunk) == schedule.parts - 1
            for own in (weights, inputs, *([forward] if predicts else [])):
                begun, final = max(begun, own[0]), min(final, own[-1])
        assert begun < final
        passing = [each.chunk for each in actions[begun + 1 : final + 1] if each.kind != "W"]
        assert passing or which == "blocks"
