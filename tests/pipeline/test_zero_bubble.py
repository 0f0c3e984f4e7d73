from __future__ import annotations

import pytest

from hpctrain.pipeline.simulate import StageTimes, simulate
from hpctrain.pipeline.zero_bubble import zb_h1, zb_h2


def test_zb_h1_matches_its_full_text() -> None:
    assert str(zb_h1(3, 4)) == (
        "# zb-h1: 3 stages, 4 micro-batches, 1 chunk, loop\n"
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3\n"
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3\n"
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    )


def test_zb_h2_matches_its_full_text() -> None:
    assert str(zb_h2(2, 4)) == (
        "# zb-h2: 2 stages, 4 micro-batches, 1 chunk, loop\n"
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3\n"
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    )


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_activations_are_those_of_the_paper(stages: int) -> None:
    enough = 3 * stages
    assert simulate(zb_h1(stages, enough), StageTimes()).peak_activations == (stages,) * stages
    assert simulate(zb_h2(stages, enough), StageTimes()).peak_activations == (2 * stages - 1,) * stages


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_bubble_for_equal_times(stages: int) -> None:
    h1, h2 = (simulate(make(stages, 3 * stages), StageTimes()) for make in (zb_h1, zb_h2))
    # The paper's (p - 1)(T_F + T_B - T_W), and nothing at all.
    assert h1.cost - h1.ideal == stages - 1
    assert h2.cost == h2.ideal
