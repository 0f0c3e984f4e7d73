"""The executor keeps the time that the simulator promises: stages that sleep, every schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpctrain.comm.world import World
from hpctrain.pipeline.generate import NAMES, generate
from hpctrain.pipeline.simulate import Simulation, Times, simulate
from tests.pipeline.sleeping import Measured, run_asleep

TIMES = Times(0.03, 0.03, 0.03)
MICRO_BATCHES = 8
POINTS = 0.02
RUNS = 5

Measure = Callable[[str], tuple[Simulation, Measured]]


@pytest.fixture(scope="module")
def measure(world: World) -> Measure:
    """Simulation and best of a few runs of a schedule by name; more than one run only on a busy machine."""
    known: dict[str, tuple[Simulation, Measured]] = {}
    run_asleep(world, generate("zb-v", world.size, 2), Times(0.001, 0.001, 0.001))  # what torch loads late

    def of(name: str) -> tuple[Simulation, Measured]:
        if name not in known:
            schedule = generate(name, world.size, MICRO_BATCHES, times=TIMES)
            simulation = simulate(schedule, TIMES)
            runs: list[Measured] = []
            while len(runs) < RUNS:
                runs.append(run_asleep(world, schedule, TIMES))
                if runs[-1].cost < (1 + POINTS) * simulation.cost:
                    break
            known[name] = simulation, min(runs, key=lambda run: run.cost)
        return known[name]

    return of


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_is_the_simulated_one(measure: Measure, name: str) -> None:
    simulation, measured = measure(name)
    assert measured.bubble_rate == pytest.approx(simulation.bubble_rate, abs=POINTS)
    # Stages sleep as long as they are told to, so that costs compare as well.
    assert measured.cost == pytest.approx(simulation.cost, rel=2 * POINTS)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v"])
def test_split_backwards_beat_1f1b(measure: Measure, name: str) -> None:
    (plain_simulation, plain), (simulation, measured) = measure("1f1b"), measure(name)
    assert measured.cost < plain.cost
    assert measured.cost / plain.cost == pytest.approx(
        simulation.cost / plain_simulation.cost, rel=2 * POINTS
    )
