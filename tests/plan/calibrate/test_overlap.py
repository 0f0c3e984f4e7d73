"""What hides and what waits, of ranks whose time is made up: each computes and communicates by its own clock.

Tests of plan/calibrate/overlap.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.plan.calibrate import overlap
from hpctrain.plan.calibrate.clock import Clock
from hpctrain.plan.calibrate.overlap import measure_overlap, measure_waits

SUM = 4e-3
"""Seconds of an all-reduce of what is measured."""


class Simulated:
    """A group whose sums take as long as told once all have come, and hide as told: the clock's time too."""

    def __init__(self, group: Group, hides: bool) -> None:
        self.group, self.hides, self.seconds, self.products = group, hides, 0.0, 0
        self.size, self.device, self.empty = group.size, group.device, group.empty

    def meet(self) -> None:
        self.seconds = float(self.group.all_reduce(torch.tensor(self.seconds, dtype=torch.float64), "max"))

    def barrier(self) -> None:
        self.meet()

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        if tensor.dtype == torch.float64:
            return self.group.all_reduce(tensor, "max")
        self.start_all_reduce(tensor).wait()
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Simulated:
        self.meet()
        self.started = self.seconds
        return self

    def test(self) -> None:
        pass

    def wait(self) -> None:
        self.seconds = max(self.seconds, self.started + SUM) if self.hides else self.seconds + SUM


class SimulatedClock(Clock):
    simulated: Simulated

    def now(self) -> float:
        return self.simulated.seconds


@pytest.fixture
def simulate(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Clock]]:
    def made(hides: bool, product: Callable[[int, int], float]) -> tuple[Any, Clock]:
        clock = SimulatedClock(world, 1e-9)
        clock.simulated = simulated = Simulated(world.everyone, hides)

        def one(_: object) -> None:
            simulated.seconds += product(world.rank, simulated.products)
            simulated.products += 1

        monkeypatch.setattr(overlap._Products, "one", one)
        return cast("Any", simulated), clock

    return made


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("hides", "share"), [(True, 1.0), (False, 0.0)])
@pytest.mark.parametrize("asked", [True, False])
def test_what_hides(
    simulate: Callable[..., tuple[Any, Clock]], hides: bool, share: float, asked: bool
) -> None:
    group, clock = simulate(hides, lambda *_: 1e-4)
    assert measure_overlap(group, 1 << 12, asked, clock) == pytest.approx(share, abs=1e-6)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_ranks_that_are_slow_in_turns_wait_for_each_other(
    simulate: Callable[..., tuple[Any, Clock]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is twice as slow as the other between every second two meetings: of 3 together they take 4."""
    even, clock = simulate(False, lambda *_: 1e-3)
    assert measure_waits(even, 1 << 12, clock) == pytest.approx(0.0, abs=1e-6)
    between = 5
    uneven, clock = simulate(False, lambda rank, done: 2e-3 if done // between % 2 == rank else 1e-3)
    monkeypatch.setattr(overlap._Products, "count_for", lambda *_: between)
    assert measure_waits(uneven, 1 << 12, clock) == pytest.approx(1 / 3, abs=1e-6)
