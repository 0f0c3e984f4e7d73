"""The executor takes the time that the simulator predicts, with every schedule."""

from __future__ import annotations

import pytest

from hpctrain.comm.world import World
from hpctrain.pipeline.generate import SCHEDULE_NAMES, generate_schedule
from hpctrain.pipeline.simulate import StageTimes, simulate
from tests.pipeline.virtual_time import run_in_virtual_time

MICRO_BATCHES = 8
SAME = StageTimes(1.0, 1.0, 1.0)
# F, I, W and a message: of the zero-bubble paper's 1.5B model, and with messages as long as work.
OTHERS = (StageTimes(18.522, 18.086, 9.337, 0.601), StageTimes(2.0, 3.0, 1.0, 2.5))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_the_bubble_is_the_simulated_one(world: World, name: str) -> None:
    schedule = generate_schedule(name, world.size, MICRO_BATCHES)
    for times in (SAME, *OTHERS):
        run, simulation = run_in_virtual_time(world, schedule, times), simulate(schedule, times)
        assert run.cost == pytest.approx(simulation.cost, rel=1e-12)
        assert run.bubble_rate == pytest.approx(simulation.bubble_rate, rel=1e-9, abs=1e-12)
        assert run.prompt


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v"])
def test_split_backwards_beat_1f1b(world: World, name: str) -> None:
    costs = [
        run_in_virtual_time(world, generate_schedule(each, world.size, MICRO_BATCHES), SAME).cost
        for each in (name, "1f1b")
    ]
    assert costs[0] < costs[1]
