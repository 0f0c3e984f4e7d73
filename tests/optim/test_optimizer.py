"""An optimizer updates whatever state its rule names, of every element once, decayed ones apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.optim.optimizer import Elements, ResidentOptimizer, decay_ranges
from hpctrain.parallel.shard import Parameter, Shard
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.state import MASTER
from tests.engines import alone, make_buckets


class Momentum:
    """Steps along the sum of all gradients; decayed elements are halved before."""

    names: ClassVar[tuple[str, ...]] = ("velocity",)
    by_element: ClassVar[bool] = True

    def update(self, parts: Sequence[Elements], learning_rate: float, gradient_divisor: float) -> None:
        for part in parts:
            part.gradients.div_(gradient_divisor)
            part.state["velocity"].add_(part.gradients)
            if part.decayed:
                part.state[MASTER].mul_(0.5)
            part.state[MASTER].sub_(learning_rate * part.state["velocity"])
            part.updates.add_(1)


class ByMatrix(Momentum):
    by_element: ClassVar[bool] = False


def made(world: World, dtype: torch.dtype) -> tuple[list[Parameter], list[Bucket]]:
    """A weight and a bias of ones, whose gradients are two."""
    parameters = [Parameter(Shard.whole("w", (6, 3))), Parameter(Shard.whole("b", (6,)), decayed=False)]
    replications = Replications.alone(alone(world).tensor)
    buckets = make_buckets([[[parameter] for parameter in parameters]], replications, dtype, 10_000)
    for parameter in parameters:
        parameter.data.fill_(1.0)
        assert parameter.gradient is not None
        parameter.gradient.fill_(2.0)
    return parameters, buckets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_of_any_name_is_updated(world: World, dtype: torch.dtype) -> None:
    (weight, bias), buckets = made(world, dtype)
    optimizer = ResidentOptimizer(Momentum(), buckets)
    (bucket,), (state,) = buckets, optimizer.states
    assert set(state) == {MASTER, "velocity"}
    assert (state[MASTER] is bucket.own_values) == (dtype == torch.float32)
    assert {flat.dtype for flat in state.values()} == {torch.float32}
    assert not torch.any(state["velocity"])
    optimizer.step(0.25, 4.0)
    assert torch.equal(weight.detach(), torch.full((6, 3), 0.5 - 0.25 * 0.5).to(dtype))
    assert torch.equal(bias.detach(), torch.full((6,), 1.0 - 0.25 * 0.5).to(dtype))
    assert torch.equal(bucket.own_gradients[: weight.numel()], torch.full((18,), 0.5))
    assert (optimizer.updates, optimizer.working_bytes) == (1, 0)
    optimizer.updates = 7
    optimizer.step(0.0, 1.0)
    assert optimizer.updates == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_master_weights_are_published(world: World, dtype: torch.dtype) -> None:
    (weight, bias), buckets = made(world, dtype)
    optimizer = ResidentOptimizer(Momentum(), buckets)
    master = optimizer.states[0][MASTER]
    assert isinstance(master, torch.Tensor)
    master.fill_(3.0)
    optimizer.publish()
    assert all(bool(parameter.eq(3.0).all()) for parameter in (weight, bias))


def test_every_element_is_decayed_or_not(world: World) -> None:
    _, (bucket,) = made(world, torch.float32)
    decayed, others = decay_ranges(bucket)
    assert (decayed.start, decayed.stop, others.stop) == (0, others.start, bucket.length)
    assert bucket.decayed == decayed.stop >= 18


def test_a_rule_of_matrices_needs_whole_ones(world: World) -> None:
    _, buckets = made(world, torch.float32)
    with pytest.raises(AssertionError, match="cut anywhere"):
        ResidentOptimizer(ByMatrix(), buckets)
