"""Work of attention with windows, as plans count it."""

from __future__ import annotations

import pytest

from hpctrain.costs.layer_flops import model_flops
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.operations import AttentionSize
from tests.engines import LLAMA, small_deck


@pytest.mark.parametrize("window", [1, 7, 100, 255, 256, 1000])
def test_a_window_counts_by_its_share_of_unmasked_pairs(window: int) -> None:
    sequence = 256
    pairs = sum(min(position + 1, window) for position in range(sequence))
    whole = AttentionSize(4, 2, 8, sequence).flops
    share = AttentionSize(4, 2, 8, sequence, window).flops / whole
    assert share == pytest.approx(pairs / (sequence * (sequence + 1) / 2), abs=0.005)


def test_flops_of_a_model_follow_its_windows() -> None:
    plain, mixed = (
        model_flops(ModelShape.of(small_deck(*LLAMA, f"model.windows={windows}"), 61)).core_forward
        for windows in ("[]", "[8, 0]")
    )
    sequence = 32
    assert mixed / plain == pytest.approx((1 + 8 * (2 * sequence - 8) / sequence**2) / 2)
