"""Lower bound of V-shaped schedules: no order of any kind costs less, and some reach it.

Tests of pipeline/v_bound.py.
"""

from __future__ import annotations

from random import Random

import pytest

from hpctrain.pipeline import v_schedule
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.simulate import StageTimes, peak_activations, simulate, times_by_part
from hpctrain.pipeline.v_bound import minimum_cost
from hpctrain.pipeline.v_schedule import LIMITS


def drawn(random: Random, parts: int) -> StageTimes:
    """Draw times of parts that are equal, nearly equal or different; some are 0."""
    low, high = random.choice([(0.9, 1.1), (0.2, 2.0), (0.0, 5.0)])
    kinds = []
    for _ in range(3):
        one = random.uniform(low, high)
        alike = random.random() < 0.4
        kinds.append([one if alike else random.uniform(low, high) for _ in range(parts)])
    return StageTimes(*kinds, random.choice([0.0, random.uniform(0, 0.5)]))


def least_of(schedule: Schedule, times: StageTimes, limit: int) -> float:
    return minimum_cost(times_by_part(times, schedule), schedule.micro_batches, limit)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_within_the_limit_is_below_the_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v_schedule, "_MAX_PLACED_ACTIONS", 20_000)
    random = Random(seed)
    for _ in range(5):
        stages, name = random.randint(2, 7), random.choice(["dualpipe-v", *LIMITS])
        micro_batches, times = random.randint(1, 4 * stages), drawn(random, 2 * stages)
        schedule = generate_schedule(name, stages, micro_batches, times=times)
        limit = max(schedule.peak_live_chunks)
        cost = simulate(schedule, times).cost
        assert least_of(schedule, times, limit) <= cost * (1 + 1e-12), (name, stages, micro_batches, times)


@pytest.mark.parametrize(("stages", "rounds"), [(2, 2), (3, 4), (8, 2), (8, 3)])
def test_zb_v_reaches_the_bound_for_equal_times(stages: int, rounds: int) -> None:
    schedule = generate_schedule("zb-v", stages, rounds * stages)
    assert max(peak_activations(schedule)) == stages
    cost = simulate(schedule, StageTimes()).cost
    assert least_of(schedule, StageTimes(), 2 * stages) == pytest.approx(cost) == 3 * rounds * stages


def test_bound_of_one_micro_batch() -> None:
    """It passes four parts down and up, and back, with 2 + 3 each and messages of 1; then W."""
    times = StageTimes([2.0] * 4, [3.0] * 4, [1.0] * 4, 1.0)
    schedule = generate_schedule("v-half", 2, 1, times=times)
    assert least_of(schedule, times, 2) == pytest.approx(4 * (2 + 3) + 4 * 1 + 1)
    assert simulate(schedule, times).cost == pytest.approx(4 * (2 + 3) + 4 * 1 + 1)


def test_a_lower_activation_limit_raises_the_bound() -> None:
    times = StageTimes([1.0] * 16, [1.1] * 16, [0.9] * 16)
    schedule = generate_schedule("zb-v", 8, 40)
    bounds = [least_of(schedule, times, limit) for limit in range(2, 17)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > 2.5 * bounds[-1]
