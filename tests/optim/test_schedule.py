from __future__ import annotations

import pytest
import torch

from hpctrain.optim.schedule import LearningRate


def test_warm_up_then_cosine_to_the_floor() -> None:
    rate = LearningRate(peak=2.0, warmup=4, decay="cosine", decay_steps=14, floor=0.1)
    assert [rate.at(step, 8) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert rate.at(4, 8) == 2.0
    assert rate.at(9, 8) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rate.at(14, 8) == pytest.approx(0.2)
    assert rate.at(1000, 8) == pytest.approx(0.2)


def test_cosine_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.05)
    ours = LearningRate(peak=1.0, warmup=0, decay="cosine", decay_steps=20, floor=0.05)
    for step in range(20):
        assert ours.at(step, 1) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_linear_and_constant() -> None:
    linear = LearningRate(peak=1.0, warmup=2, decay="linear", decay_steps=12, floor=0.5)
    assert linear.at(7, 1) == pytest.approx(0.75)
    constant = LearningRate(peak=1.0, warmup=2, decay="constant", decay_steps=12, floor=0.5)
    assert constant.at(99, 1) == 1.0


def test_rate_follows_the_batch_if_asked() -> None:
    rate = LearningRate(1.0, 0, "constant", 10, 0.0, reference_batch=32)
    assert [rate.at(5, batch) for batch in (16, 32, 64)] == [0.5, 1.0, 2.0]
