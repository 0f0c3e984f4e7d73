"""Advantages against sums written out from the papers. Tests of post/advantages.py."""

from __future__ import annotations

import pytest
import torch

from hpctrain.post.advantages import generalized_advantages, group_advantages, whiten

ANSWERED = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.0), (0.97, 1.0)])
def test_generalized_advantages_are_sums_of_later_errors(gamma: float, gae_lambda: float) -> None:
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, *ANSWERED.shape, generator=generator, dtype=torch.float64)
    found = generalized_advantages(rewards, values, ANSWERED, gamma, gae_lambda)
    for row, answered in enumerate(ANSWERED):
        places = answered.nonzero().flatten().tolist()
        for number, place in enumerate(places):
            wanted = 0.0
            for later, there in enumerate(places[number:]):
                follows = float(values[row, there + 1]) if there != places[-1] else 0.0
                wrong = float(rewards[row, there]) + gamma * follows - float(values[row, there])
                wanted += (gamma * gae_lambda) ** later * wrong
            assert float(found[row, place]) == pytest.approx(wanted, abs=1e-12)
            if gae_lambda == 1:  # then it is all that comes, discounted, beyond what was expected
                comes = sum(gamma**k * float(rewards[row, at]) for k, at in enumerate(places[number:]))
                assert float(found[row, place]) == pytest.approx(comes - float(values[row, place]), abs=1e-12)
    assert not found[~ANSWERED].any()


def test_whitened() -> None:
    generator = torch.Generator().manual_seed(5)
    given = 3 + 2 * torch.randn(ANSWERED.shape, generator=generator, dtype=torch.float64)
    found = whiten(given, ANSWERED)
    assert float(found[ANSWERED].mean()) == pytest.approx(0, abs=1e-12)
    assert float(found[ANSWERED].std()) == pytest.approx(1, rel=1e-5)
    assert not found[~ANSWERED].any()
    alone = torch.zeros_like(ANSWERED)
    alone[0, 0] = True
    assert torch.equal(whiten(given, alone), given * alone)


def test_groups() -> None:
    scores = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 4.0], dtype=torch.float64)
    # 7 is the unbiased variance of 1, 2 and 6.
    wanted = torch.tensor([-2.0, -1.0, 3.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(scores, 3, scale=False), wanted)
    torch.testing.assert_close(group_advantages(scores, 3, scale=True), wanted / 7**0.5, rtol=1e-5, atol=0)
    assert not group_advantages(scores, 1, scale=True).any()
    assert not group_advantages(scores, 1, scale=False).any()
