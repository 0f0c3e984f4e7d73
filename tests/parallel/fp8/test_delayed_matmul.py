"""Maxima of steps before."""

from __future__ import annotations

import torch

from hpctrain.parallel.fp8.delayed_matmul import MaximaHistory


def test_the_largest_of_the_last_steps_counts() -> None:
    history = MaximaHistory(torch.zeros(3))
    assert history.largest.tolist() == [[0.0]]
    seen = [5.0, 1.0, 2.0, 0.5, 7.0, 1.0, 1.0, 0.25]
    for step, maximum in enumerate(seen, 1):
        history.append(torch.tensor(maximum, dtype=torch.float64))
        assert history.largest.item() == max(seen[max(0, step - 3) : step])
    assert history.maxima.tolist() == [0.25, 1.0, 1.0]
    assert history.maxima.dtype == torch.float32


def test_one_step_is_enough_of_a_history() -> None:
    history = MaximaHistory(torch.zeros(1))
    for maximum in (4.0, 2.0):
        history.append(torch.tensor(maximum))
        assert history.largest.item() == maximum


def test_zeros_are_not_remembered() -> None:
    history = MaximaHistory(torch.zeros(2))
    for maximum in (0.0, 3.0, 0.0, 0.0, 0.0):
        history.append(torch.tensor(maximum))
    assert history.maxima.tolist() == [3.0, 0.0]
