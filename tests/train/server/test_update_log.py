"""Steps of pushes, their staleness, and workers that are slow, worked out by hand."""

from __future__ import annotations

from math import isnan, nan

import pytest

from hpctrain.engine.layout.server_roles import ServerRoles
from hpctrain.train.hook import StepDone
from hpctrain.train.server.server_messages import Push
from hpctrain.train.server.update_log import SlowWorkers, UpdateLog, histogram_text
from hpctrain.train.step import TrainState
from hpctrain.watch.stragglers import WINDOW


def push(loss: float, tokens: int, finite: bool = True, seconds: float = 1.0) -> Push:
    return Push(0, finite, finite, 2.0, tokens, seconds, False, (loss,), ())


def book(workers: int, told: list[StepDone]) -> UpdateLog:
    made = UpdateLog(TrainState(step=3, samples=36, tokens=100), ("loss",), workers, told.append)
    made.start(5)
    return made


def test_as_many_pushes_as_workers_are_a_step() -> None:
    """The third one's is not finite: it is left out, and does not count in the loss."""
    told: list[StepDone] = []
    made = book(3, told)
    made.record([0], [push(10.0, 4)], [0], 1.0, 0.1, True, 12)
    made.record([0], [push(20.0, 6)], [1], 3.0, 0.1, True, 12)
    assert not told
    made.record([2], [push(nan, 5, finite=False)], [4], nan, 0.1, False, 12)
    (done,) = told
    result = done.result
    assert result.metrics == {"loss": 3.0}
    assert (result.grad_norm, result.tokens, result.staleness) == (2.0, 15, (1, 1, 0, 0, 1))
    assert not result.skipped
    state = made.state
    assert (state.step, state.samples, state.tokens, state.skipped, made.discarded_pushes) == (
        4,
        48,
        115,
        0,
        1,
    )
    assert histogram_text(made.staleness) == "0: 1, 1: 1, 4: 1"


def test_an_update_of_all_pushes_is_skipped_as_a_whole() -> None:
    told: list[StepDone] = []
    made = book(2, told)
    made.record([0, 1], [push(10.0, 4), push(nan, 6, finite=False)], [0, 1], nan, 0.1, False, 12)
    (done,) = told
    assert done.result.skipped and isnan(done.result.loss) and made.state.skipped == 1
    assert done.result.staleness == (1, 1)


def test_a_step_tells_the_bytes_that_its_rank_has_moved() -> None:
    told: list[StepDone] = []
    moved = iter((100, 120, 150, 190))
    made = UpdateLog(TrainState(), ("loss",), 1, told.append, lambda: next(moved))
    made.start(5)
    made.record([0], [push(8.0, 4)], [0], 1.0, 0.1, True, 12)
    made.record([0], [push(8.0, 4)], [0], 1.0, 0.1, True, 12)
    assert [done.payload for done in told] == [30, 40]


def test_the_last_step_before_all_meet_is_kept_for_them() -> None:
    told: list[StepDone] = []
    made = book(1, told)
    for _ in range(2):
        made.record([0], [push(8.0, 4)], [0], 1.0, 0.1, True, 12)
    assert len(told) == 1 and made.last_step is not None and made.last_step.result.loss == 2.0
    made.start(9)
    assert made.last_step is None


@pytest.mark.parametrize(("factor", "ranks"), [(1.5, [3]), (4.0, []), (0.0, None)])
def test_slow_workers_are_named_by_their_ranks(factor: float, ranks: list[int] | None) -> None:
    made = book(3, [])
    slow = SlowWorkers(made, ServerRoles(1, 3), ["a", "b", "c", "d"], factor)
    for number in range(WINDOW):
        found = slow.step(0.0)
        for worker, seconds in enumerate((1.0, 1.1, 3.0)):
            made.record([worker], [push(1.0, 1, seconds=seconds)], [0], 1.0, 0.1, True, 12)
        assert found is None or number == WINDOW - 1
    found = slow.step(0.0) if found is None else found
    assert (None if found is None else [(each.rank, each.node) for each in found]) == (
        None if ranks is None else [(rank, "abcd"[rank]) for rank in ranks]
    )
