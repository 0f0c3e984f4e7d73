"""Compare Lion with its authors' formula in NumPy, and with a run with servers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.optim.lion import MEAN, Lion
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.sharding.state import MASTER
from tests.engines import LLAMA, reference
from tests.optim.test_adamw import master, setup
from tests.train.server.served import plain, served, served_deck, values

NAME = "optimizer.name=lion"
KEYS = (NAME, *LLAMA, "learning_rate.peak=1e-3", "optimizer.weight_decay=0.5")
VOCABULARY = 61


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ten_updates_are_those_of_the_paper(
    world: World, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with algorithm 2 of arXiv 2302.06675. Only matrices decay; pieces are shorter than tensors."""
    monkeypatch.setattr("hpctrain.optim.optimizer.PIECE", 8)
    parameters, buckets = setup(world, dtype)
    ours = ResidentOptimizer(Lion((0.9, 0.99), 0.3), buckets)
    weights = {name: p.detach().float().numpy().astype(np.float64) for name, p in parameters.items()}
    means = {name: np.zeros_like(each) for name, each in weights.items()}
    draw = np.random.default_rng(7)
    for step in range(10):
        rate = 0.01 * (step + 1)
        for name, parameter in parameters.items():
            gradient = draw.normal(0, 3.0 ** draw.integers(-4, 4), parameter.shape).astype(np.float32)
            gradient[0] *= name != "norm.weight"
            parameter.gradient.copy_(torch.from_numpy(gradient * 4))
            decay = 0.3 if gradient.ndim == 2 else 0.0
            update = np.sign(0.9 * means[name] + 0.1 * gradient)
            weights[name] = weights[name] - rate * (update + decay * weights[name])
            means[name] = 0.99 * means[name] + 0.01 * gradient
        before = float(master(ours, parameters["norm.weight"])[0])
        ours.step(rate, 4.0)
        for name, parameter in parameters.items():
            found = master(ours, parameter)
            np.testing.assert_allclose(found.detach().numpy(), weights[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(parameter.detach(), found.to(dtype))
        assert master(ours, parameters["norm.weight"])[0] == before  # never had a gradient
    assert ours.updates == 10
    assert all(set(state) == {MASTER, MEAN} for state in ours.states)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_server_updates_like_a_run_without_servers(world: World) -> None:
    deck = served_deck("sync", 1, *KEYS)
    training, alone = served(world, deck), reference(world, plain(deck))
    for _ in range(3):
        assert training.train_step().loss == pytest.approx(alone.train_step().loss, rel=1e-5)
    found, expected = values(training), alone.parameters()
    assert found.keys() == expected.keys()
    apart = sum(int(((each - expected[name]).abs() > 1e-5).sum()) for name, each in found.items())
    assert apart <= 1e-3 * sum(each.numel() for each in expected.values())
