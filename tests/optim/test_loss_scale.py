from __future__ import annotations

from hpctrain.deck.sections.precision import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE
from hpctrain.optim.loss_scale import LossScale


def test_halves_on_overflow_and_doubles_after_the_window() -> None:
    scale = LossScale(1024.0, 3)
    values = []
    for finite in (True, True, False, True, True, True, True):
        scale.update(finite)
        values.append(scale.value)
    assert values == [1024, 1024, 512, 512, 512, 1024, 1024]


def test_stays_within_its_bounds() -> None:
    scale = LossScale(1.0, 1)
    for _ in range(100):
        scale.update(True)
    assert scale.value == LARGEST_LOSS_SCALE
    for _ in range(100):
        scale.update(False)
    assert scale.value == SMALLEST_LOSS_SCALE


def test_without_a_window_it_is_constant() -> None:
    scale = LossScale(1.0, 0)
    scale.update(False)
    assert scale.value == 1.0
