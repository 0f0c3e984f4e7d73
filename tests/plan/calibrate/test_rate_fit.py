"""Fits find the numbers by which seconds were made up.

Tests of plan/calibrate/rate_fit.py.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from hpctrain.plan.calibrate.rate_fit import ProductTime, fit_attention, fit_link, fit_products, not_negative
from hpctrain.plan.time.machine_rates import ProductPass, ProductRates

SIDES = (64, 256, 1024)


def times(rates: ProductRates, kind: ProductPass, noise: float = 0.0) -> list[ProductTime]:
    draw = random.Random(0)
    return [
        ProductTime(kind, m, n, k, rates.seconds(m, n, k) * (1 + noise * draw.uniform(-1, 1)))
        for m, n, k in product(SIDES, SIDES, SIDES)
    ]


@pytest.mark.parametrize(("rate", "saturation"), [(1e11, 20.0), (3e14, 130.0), (2e9, 0.0)])
def test_planted_rates_are_found(rate: float, saturation: float) -> None:
    planted = ProductRates(peak=rate, efficiency=1.0, saturation=saturation)
    found = fit_products(times(planted, "forward"))
    assert found.peak * found.efficiency == pytest.approx(rate, rel=1e-6)
    assert found.saturation == pytest.approx(saturation, abs=1e-6 * max(1.0, saturation))
    assert found.peak <= rate * (1 + 1e-9)  # what some product had


def test_noise_hardly_moves_them() -> None:
    planted = ProductRates(peak=1e11, efficiency=1.0, saturation=40.0)
    found = fit_products(times(planted, "forward", noise=0.05))
    assert found.seconds(512, 512, 512) == pytest.approx(planted.seconds(512, 512, 512), rel=0.03)
    assert found.saturation == pytest.approx(40.0, rel=0.15)


def test_passes_have_numbers_of_their_own() -> None:
    forward = ProductRates(peak=1e11, efficiency=1.0, saturation=10.0)
    weight = ProductRates(peak=1e11, efficiency=0.8, saturation=50.0)
    few = [ProductTime("logits", 128, 5000, 64, 2 * forward.seconds(128, 5000, 64))]
    found = fit_products([*times(forward, "forward"), *times(weight, "weight_gradient"), *few])
    for planted, kind in ((forward, "forward"), (weight, "weight_gradient")):
        assert found.seconds(300, 70, 900, kind) == pytest.approx(planted.seconds(300, 70, 900), rel=1e-6)
    assert found.seconds(128, 5000, 64, "logits") == pytest.approx(few[0].seconds)  # one shape: only scaled
    assert found.passes["logits"].saturation == found.saturation


def test_times_that_no_saturation_explains_leave_none() -> None:
    """Small products that are quicker than large ones."""
    rows = [ProductTime("forward", s, s, s, 2 * s**3 / (1e11 * (1 + 10 / s))) for s in SIDES]
    found = fit_products(rows)
    assert found.saturation == 0.0
    assert found.efficiency > 0
    alone = fit_products([ProductTime("forward", 8, 8, 8, 1e-6)])
    assert alone.seconds(8, 8, 8) > 0


def test_attention_s_rates_are_found() -> None:
    rows = [
        (
            4.0 * features * sequence,
            features,
            features * (4 * sequence / 6e10 + 2e-9),
            features * 8 * sequence / 5e10,
        )
        for features, sequence in ((1e6, 64.0), (1e6, 256.0), (3e6, 512.0))
    ]
    found = fit_attention(rows)
    assert found.forward == pytest.approx(6e10)
    assert found.backward == pytest.approx(5e10)
    assert found.features[0] == pytest.approx(2e-9)
    assert found.features[1] == pytest.approx(0.0, abs=1e-15)


def test_links_are_found() -> None:
    sizes = [4.0**power for power in range(5, 15)]
    link = fit_link(sizes, [3e-6 + size / 5e9 for size in sizes])
    assert link.bandwidth == pytest.approx(5e9)
    assert link.latency == pytest.approx(3e-6)
    quick = fit_link(sizes, [size / 1e9 for size in sizes])
    assert quick.latency == pytest.approx(0.0, abs=1e-12)


def test_neither_part_is_below_zero() -> None:
    assert not_negative([1.0, 2.0], [1.0, 0.0])[0] > 0
    first, second = not_negative([1.0, 2.0, 3.0], [-1.0, -1.0, -1.5])
    assert first > 0
    assert second == 0
    first, second = not_negative([-1.0, -2.0], [1.0, 1.0])
    assert first == 0
    assert second == pytest.approx(1.0)


def test_attention_that_takes_no_longer_for_longer_sequences_has_a_rate() -> None:
    """As where something else has held up the shorter ones."""
    rows = [(4.0 * length * 64, 64.0, 1.1 - length / 4096, 2.2 - length / 2048) for length in (256, 512)]
    found = fit_attention(rows)
    assert found.forward is not None and found.backward is not None
    assert max(found.forward, found.backward) < 1e6


def test_a_link_whose_large_messages_take_no_longer_has_a_rate() -> None:
    assert fit_link([1e3, 1e6], [4e-3, 3e-3]).bandwidth < 1e12
