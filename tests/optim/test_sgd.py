"""Compare SGD on flat buckets with torch's on separate tensors."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.optim.sgd import SGD, VELOCITY
from hpctrain.sharding.state import MASTER
from tests.optim.test_adamw import setup

RULES = [(0.0, False), (0.9, False), (0.9, True)]


@pytest.mark.parametrize(("momentum", "nesterov"), RULES)
def test_updates_are_those_of_torch(world: World, momentum: float, nesterov: bool) -> None:
    """Torch adds weight decay to gradients. Here it is decoupled, as in AdamW, and computed by hand."""
    parameters, buckets = setup(world, torch.float32)
    ours = ResidentOptimizer(SGD(momentum, nesterov, 0.1), buckets)
    copies = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    theirs = torch.optim.SGD(copies.values(), lr=1.0, momentum=momentum, nesterov=nesterov)
    for step in range(5):
        rate = theirs.param_groups[0]["lr"] = 0.01 * (step + 1)
        for name, parameter in parameters.items():
            gradient = torch.randn(parameter.shape)
            copies[name].grad = gradient.clone()
            parameter.gradient.copy_(gradient * 4.0)
            if parameter.ndim == 2:
                copies[name].data.mul_(1 - rate * 0.1)
        theirs.step()
        ours.step(rate, 4.0)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=1e-6, atol=1e-7)
    assert ours.updates == 5


def test_without_momentum_there_is_no_state(world: World) -> None:
    _, buckets = setup(world, torch.bfloat16)
    assert all(set(each) == {MASTER} for each in ResidentOptimizer(SGD(0.0, False, 0.0), buckets).states)
    kept = ResidentOptimizer(SGD(0.9, False, 0.0), buckets).states
    assert all(set(each) == {MASTER, VELOCITY} for each in kept)
