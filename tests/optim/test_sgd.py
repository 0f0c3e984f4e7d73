"""Our SGD on flat buckets against torch's on separate tensors, cut by ZeRO, and from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.optim.sgd import SGD, VELOCITY
from hpctrain.sharding.state import MASTER
from tests.engines import small_deck, trainer
from tests.optim.test_adamw import setup

RULES = [(0.0, False), (0.9, False), (0.9, True)]
STEPS = 3


@pytest.mark.parametrize(("momentum", "nesterov"), RULES)
def test_updates_are_those_of_torch(world: World, momentum: float, nesterov: bool) -> None:
    """Torch adds its weight decay to gradients; ours, decoupled as AdamW's, is made here by hand."""
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


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("momentum", ["0.0", "0.9"])
def test_cut_or_in_files_the_updates_are_the_same_bits(
    world: World, mpi_tmp_path: Path, momentum: str
) -> None:
    keys = ("optimizer.name=sgd", f"optimizer.momentum={momentum}", "precision.compute=bf16")
    keys += ("optimizer.nesterov=true",) if float(momentum) else ()
    plain = trainer(world, small_deck(*keys))
    losses = [step.loss for step in plain.train(STEPS)]
    assert losses[-1] < losses[0]
    disk = ("memory.optimizer=disk", "memory.offload_buffer=12000", f"memory.offload_dir={mpi_tmp_path}")
    for more in (("layout.zero=1",), disk, ("layout.zero=1", *disk)):
        other = trainer(world, small_deck(*keys, *more))
        assert [step.loss for step in other.train(STEPS)] == losses, more
        expected = plain.parameters()
        assert all(torch.equal(values, expected[name]) for name, values in other.parameters().items()), more
        other.engine.close()
        world.everyone.barrier()
