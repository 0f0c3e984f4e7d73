"""Optimizers update all state that a rule names, once for each element, and decay some elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.comm.world import World
from hpctrain.costs.update_bytes import update_bytes
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.lion import Lion
from hpctrain.optim.optimizer import ElementBatch, ResidentOptimizer, UpdateRule
from hpctrain.optim.schedule_free import ScheduleFree
from hpctrain.optim.sgd import SGD
from hpctrain.parallel.shards import Parameter, Shard, UpdateSettings
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketLayout
from hpctrain.sharding.replication import Replications, ZeroSharding
from hpctrain.sharding.state import MASTER
from tests.engines import alone, make_buckets


class Momentum:
    """Rule that steps along the sum of all gradients, and first halves elements with decay."""

    names: ClassVar[tuple[str, ...]] = ("velocity",)

    def update(self, parts: Sequence[ElementBatch], learning_rate: float, gradient_divisor: float) -> None:
        for part in parts:
            part.gradients.div_(gradient_divisor)
            part.state["velocity"].add_(part.gradients)
            if part.update_settings.has_weight_decay:
                part.state[MASTER].mul_(0.5)
            part.state[MASTER].sub_(
                learning_rate * part.update_settings.learning_rate_factor * part.state["velocity"]
            )
            part.updates.add_(1)


def made(world: World, dtype: torch.dtype) -> tuple[list[Parameter], list[Bucket]]:
    """Return buckets of a weight and a bias of ones with gradients of two."""
    parameters = [
        Parameter(Shard.replicated("w", (6, 3))),
        Parameter(Shard.replicated("b", (6,)), has_weight_decay=False),
    ]
    replications = Replications.of_one_rank(alone(world).tensor)
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
    assert (state[MASTER] is bucket.owned_values) == (dtype == torch.float32)
    assert {flat.dtype for flat in state.values()} == {torch.float32}
    assert not torch.any(state["velocity"])
    optimizer.step(0.25, 4.0)
    assert torch.equal(weight.detach(), torch.full((6, 3), 0.5 - 0.25 * 0.5).to(dtype))
    assert torch.equal(bias.detach(), torch.full((6,), 1.0 - 0.25 * 0.5).to(dtype))
    assert torch.equal(bucket.owned_gradients[: weight.numel()], torch.full((18,), 0.5))
    assert (optimizer.updates, update_bytes(optimizer)) == (1, 0)
    optimizer.updates = 7
    optimizer.step(0.0, 1.0)
    assert optimizer.updates == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_master_weights_are_copied_to_parameters(world: World, dtype: torch.dtype) -> None:
    (weight, bias), buckets = made(world, dtype)
    optimizer = ResidentOptimizer(Momentum(), buckets)
    master = optimizer.states[0][MASTER]
    assert isinstance(master, torch.Tensor)
    master.fill_(3.0)
    optimizer.copy_to_parameters()
    assert all(bool(parameter.eq(3.0).all()) for parameter in (weight, bias))


def test_each_element_has_its_decay(world: World) -> None:
    _, (bucket,) = made(world, torch.float32)
    decayed, others = bucket.layout.owned_update_ranges
    assert (decayed.update_settings, others.update_settings) == (UpdateSettings(True), UpdateSettings(False))
    assert (decayed.part, others.part) == (slice(0, 64), slice(64, bucket.length))


def test_elements_with_equal_settings_are_neighbours() -> None:
    """Ranges are padded to a multiple of 64. The second of two ranks has parts of three ranges."""
    sizes = {"a": (70, 0.5), "b": (3, 1.0), "c": (60, 0.5), "d": (5, 2.0)}
    parameters = [Parameter(Shard.replicated(name, (size, 1))) for name, (size, _) in sizes.items()]
    for parameter, (_, rate) in zip(parameters, sizes.values(), strict=True):
        parameter.learning_rate_factor = rate
    group = planned_group(("data",), 1, 2, Ledger())
    sharding = ZeroSharding(1, group, group)
    layout = BucketLayout.of([[each] for each in parameters], sharding, Replications.of_one_rank(group))
    starts = {segment.parameter.shard.name: segment.start for segment in layout.segments}
    assert (starts, layout.length) == (
        {"a": 0, "c": 70, "b": 192, "d": 256},
        384,
    )
    assert [(each.part, each.update_settings.learning_rate_factor) for each in layout.update_ranges] == [
        (slice(0, 192), 0.5),
        (slice(192, 256), 1.0),
        (slice(256, 384), 2.0),
    ]
    assert layout.owned_slice == slice(192, 384)
    assert [
        (each.part, each.update_settings.learning_rate_factor) for each in layout.owned_update_ranges
    ] == [
        (slice(0, 64), 1.0),
        (slice(64, 192), 2.0),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda decay: AdamW((0.9, 0.95), 1e-8, decay),
        lambda decay: AdamW((0.9, 0.95), 1e-8, decay, momentum_after=1),
        lambda decay: SGD(0.9, True, decay),
        lambda decay: Lion((0.9, 0.95), decay),
        lambda decay: ScheduleFree((0.9, 0.95), 1e-8, decay),
    ],
    ids=["adamw", "one-bit", "sgd", "lion", "schedule-free"],
)
def test_a_parameter_has_its_own_rate(world: World, make: Callable[[float], UpdateRule]) -> None:
    """A quarter of the rate 0.5 is exactly 0.125. Decay takes the rate without this factor."""
    results = []
    for factor, learning_rate, decay in ((0.25, 0.5, 0.1), (1.0, 0.125, 0.4), (1.0, 0.5, 0.1)):
        rule = make(decay)
        weight, bias = (
            Parameter(Shard.replicated("w", (6, 3))),
            Parameter(Shard.replicated("b", (6,)), has_weight_decay=False),
        )
        weight.learning_rate_factor = factor
        buckets = make_buckets(
            [[[weight], [bias]]], Replications.of_one_rank(alone(world).tensor), torch.float32, 10_000
        )
        optimizer = ResidentOptimizer(rule, buckets)
        torch.manual_seed(3)
        for parameter in (weight, bias):
            parameter.data.copy_(torch.randn(parameter.shape))
        for _ in range(3):
            for parameter in (weight, bias):
                assert parameter.gradient is not None
                parameter.gradient.copy_(torch.randn(parameter.shape))
            optimizer.step(learning_rate, 2.0)
        results.append((weight.detach().clone(), bias.detach().clone()))
    (scaled, as_said), (slow, _), (fast, plain) = results
    assert torch.equal(scaled, slow)
    assert torch.equal(as_said, plain)
    assert not torch.equal(scaled, fast)
