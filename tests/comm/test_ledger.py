"""The ledger's seconds: where they were spent, whenever what took them was started.

Tests of comm/ledger.py; what it counts is tested in comm/test_group.py.
"""

from __future__ import annotations

import pytest

from hpctrain.comm import ledger as module
from hpctrain.comm.ledger import Ledger


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the ledger reads."""
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def test_seconds_are_those_of_the_phase_they_were_spent_in(clock: list[float]) -> None:
    ledger = Ledger()
    ledger.phase = "backward"
    clock[0] = 10
    entry = ledger.enter("data", "all_reduce", 8, 0.5)
    ledger.phase = "synchronize"
    clock[0] = 13
    ledger.add_seconds(entry, 2.0)
    ledger.phase = "step"
    assert ledger.seconds_by_entry() == {("data", "all_reduce", "backward"): 2.5}
    assert ledger.call_seconds == {"backward": 0.5, "synchronize": 2.0}
    assert ledger.phase_seconds == {"other": 0, "backward": 10, "synchronize": 3}
    ledger.reset()
    assert not ledger.call_seconds
    assert not ledger.seconds_by_entry()


def test_what_is_sent_while_computing_again_is_sending(clock: list[float]) -> None:
    ledger = Ledger()
    ledger.phase = "backward"
    entry = ledger.enter("tensor", "all_reduce", 8, 7.0)
    for _ in range(2):
        with ledger.recomputing():
            clock[0] += 5
            ledger.add_seconds(entry, 2.0)
    assert ledger.recompute_seconds == 6
    ledger.reset()
    assert ledger.recompute_seconds == 0


def test_time_of_a_recomputation_that_fails_counts(clock: list[float]) -> None:
    def fail() -> None:
        with ledger.recomputing():
            clock[0] += 5
            raise ValueError("failed")

    ledger = Ledger()
    with pytest.raises(ValueError, match="failed"):
        fail()
    assert ledger.recompute_seconds == 5
