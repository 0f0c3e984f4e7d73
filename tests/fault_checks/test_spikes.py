"""Which values are spikes, and what is recorded of them."""

from __future__ import annotations

import json
import random
from math import inf, nan

import pytest

from hpctrain.fault_checks.spikes import (
    LEAST_DEVIATION,
    Spike,
    SpikeDetector,
    recorded_spikes,
)
from hpctrain.train.rollback_history import find_rollback, rollback_steps


def watching(
    window: int = 16, factor: float = 6.0, most: int = 3, has_loss_scale: bool = False
) -> SpikeDetector:
    return SpikeDetector("skip", window, factor, most, warmup=4, has_loss_scale=has_loss_scale)


def fed(spikes: SpikeDetector, steps: int, seed: int = 0) -> SpikeDetector:
    draw = random.Random(seed)
    for _ in range(steps):
        spikes.add_step(3.0 + 0.05 * draw.gauss(0, 1), 1.0 + 0.1 * draw.gauss(0, 1))
    return spikes


def test_there_are_no_spikes_in_the_warm_up_or_with_few_steps() -> None:
    assert watching().find_spike(4, 30.0, 1.0, 0, 8) is None
    assert fed(watching(), 15).find_spike(16, 30.0, 1.0, 0, 8) is None
    assert fed(watching(), 16).find_spike(4, 30.0, 1.0, 0, 8) is None
    assert fed(watching(), 16).find_spike(17, 30.0, 1.0, 0, 8) is not None


def test_only_values_far_above_are_spikes() -> None:
    spikes = fed(watching(), 40)
    assert spikes.find_spike(41, 3.1, 1.2, 0, 8) is None
    assert spikes.find_spike(41, 0.1, 0.0, 0, 8) is None
    loss = spikes.find_spike(41, 4.0, 1.0, 320, 8)
    assert loss is not None
    assert loss.why.startswith("loss 4 is ")
    assert "gradient norm" not in loss.why
    assert (loss.step, loss.first_sample, loss.samples, loss.back_to) == (41, 320, 8, None)
    norm = spikes.find_spike(41, 3.0, 5.0, 320, 8)
    assert norm is not None
    assert norm.why.startswith("gradient norm 5 is ")


def test_the_factor_counts_deviations_of_normal_values() -> None:
    """The standard deviation of normal values is 1.4826 times their median absolute deviation."""
    spikes, draw = SpikeDetector("skip", 10_000, 6.0, 3, warmup=0), random.Random(5)
    for _ in range(10_000):
        spikes.add_step(draw.gauss(10.0, 2.0), draw.gauss(5.0, 0.5))
    assert spikes.find_spike(20_000, 10.0 + 5.7 * 2.0, 5.0, 0, 1) is None
    assert spikes.find_spike(20_000, 10.0 + 6.3 * 2.0, 5.0, 0, 1) is not None
    assert spikes.find_spike(20_000, 10.0, 5.0 + 5.7 * 0.5, 0, 1) is None
    assert spikes.find_spike(20_000, 10.0, 5.0 + 6.3 * 0.5, 0, 1) is not None


def test_accepted_outliers_hardly_change_median_and_deviation() -> None:
    spikes = fed(watching(32), 26)
    for _ in range(6):
        spikes.add_step(1e6, 1e9)
    assert spikes.find_spike(50, 4.0, 1.0, 0, 8) is not None


def test_nearly_constant_values_have_a_least_deviation() -> None:
    spikes = watching()
    for _ in range(16):
        spikes.add_step(2.0, 1.0)
    assert spikes.find_spike(30, 2.0 + 5.9 * LEAST_DEVIATION * 2.0, 1.0, 0, 8) is None
    assert spikes.find_spike(30, 2.0 + 6.1 * LEAST_DEVIATION * 2.0, 1.0, 0, 8) is not None


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_a_value_that_is_not_finite_is_always_a_spike(value: float) -> None:
    spike = watching().find_spike(1, value, 1.0, 0, 8)
    assert spike is not None
    assert spike.loss is None
    assert "is not finite" in spike.why
    assert watching().find_spike(1, 3.0, value, 0, 8) is not None
    # A loss scale that is too large makes such norms, and sees to it.
    assert watching(has_loss_scale=True).find_spike(1, 3.0, value, 0, 8) is None
    assert watching(has_loss_scale=True).find_spike(1, value, value, 0, 8) is not None


def test_a_detector_that_is_off_has_no_state() -> None:
    spikes = SpikeDetector("off", 16, 6.0, 3, 0)
    assert not spikes.enabled
    assert spikes.state() == {}


def test_state_is_restored_from_a_file() -> None:
    spikes = fed(watching(), 40)
    spike = spikes.find_spike(41, nan, 5.0, 320, 8)
    assert spike is not None
    spikes.record_spike(spike)
    stored = json.loads(json.dumps(spikes.state()))
    again = watching()
    again.resume(stored)
    assert again.state() == spikes.state()
    assert again.count == 1
    assert recorded_spikes(stored) == [spike]
    assert recorded_spikes({"spikes": {"found": [3, {"step": 1}]}}) == []
    shorter = watching(8)
    shorter.resume(stored)
    assert len(shorter.state()["spikes"]["window"]) == 8
    watching().resume({})


def test_the_record_survives_a_rollback() -> None:
    spikes = fed(watching(), 40)
    before = json.loads(json.dumps(spikes.state()))
    first, second = (Spike(step, 9.0, 1.0, "far", 0, 8) for step in (41, 45))
    spikes.record_spike(first)
    fed(spikes, 5, seed=1)
    record = spikes.record
    spikes.resume(before)
    spikes.restore_record(record, second)
    assert spikes.state()["spikes"]["window"] == before["spikes"]["window"]
    assert (spikes.count, list(spikes.recorded)) == (2, [first, second])


def test_spikes_tell_the_steps_that_a_run_discarded() -> None:
    """It went back from step 17 to 12, from there on to 16 and back to 10, left out an update, and went back
    from 30 to 26.
    """
    skipped = Spike(21, 9.0, 1.0, "far", 0, 8)
    first, second, third = (
        Spike(step, 9.0, 1.0, "far", 0, 8, back) for step, back in ((17, 12), (16, 10), (30, 26))
    )
    known = [first, second, skipped, third]
    assert rollback_steps(known) == [10, 26]
    assert rollback_steps([first, skipped, Spike(20, 9.0, 1.0, "far", 0, 8, 12)]) == [12]

    def stored(step: int, *spikes: Spike) -> dict[str, object]:
        spiking = SpikeDetector("rollback", 8, 3.0, 9, 0)
        for spike in spikes:
            spiking.record_spike(spike)
        return {"step": step, **spiking.state()}

    cases = {
        None: [stored(9), stored(10, first, second), stored(25, *known[:3]), stored(26, *known)],
        10: [stored(10), stored(11), stored(16), stored(12, first), stored(15, first)],
        26: [stored(26, *known[:3]), stored(29, *known[:3])],
    }
    for back, states in cases.items():
        assert [find_rollback(state, known) for state in states] == [back] * len(states)
