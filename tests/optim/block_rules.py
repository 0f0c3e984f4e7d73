"""What tests of rules of blocks have in common: parameters without a model, layouts and what these hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.memory.accounts import storage_bytes
from hpctrain.optim.block_rule import BlockRules
from hpctrain.optim.blocks import BlockOptimizer
from hpctrain.parallel.shard import Parameter, Shard
from hpctrain.plan.memory import plan_memory
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.state import MODEL
from hpctrain.train.checkpoints import Checkpoints
from tests.engines import LLAMA, Trainer, alone, make_buckets, reference, small_deck, trainer
from tests.train.test_run import contents

SHAPES = {"query": (8, 6), "matrix": (5, 7), "norm": (6,), "experts": (3, 2, 4, 5)}
HEAD = 4
EXPERTS = ("model.experts=4", "model.experts_per_token=2", "model.expert_mlp=48")

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    **{f"zero {stage}": (2, (f"layout.zero={stage}",)) for stage in range(4)},
    "gpt2, tensor": (2, ("layout.tensor=2", "layout.sequence_parallel=true", "model.family=gpt2")),
    "tensor, shared heads": (2, ("layout.tensor=2", "model.key_value_heads=1")),
    "pipeline, tied": (2, ("layout.pipeline=2", "model.tied=true")),
    "experts": (2, (*EXPERTS, "layout.expert=2", "layout.zero=1")),
    "experts, cut": (2, (*EXPERTS, "layout.tensor=2", "layout.expert_tensor=2")),
}

Update = Callable[[str, np.ndarray, np.ndarray, int, float], np.ndarray]
"""New weights of (name, weights, gradient, t, rate), with DECAY of matrices; keeps state of its own."""

DECAY = 0.3


def ten_updates(world: World, dtype: torch.dtype, rules: BlockRules, expected: Update) -> BlockOptimizer:
    """Ten steps of the parameters above, whose matrices are decayed, are those that `expected` makes. One of
    them has a quarter of the rate, but as much decay.
    """
    shards = {name: Shard.whole(name, shape) for name, shape in SHAPES.items()}
    shards["query"] = replace(shards["query"], unit=HEAD)
    parameters = {name: Parameter(shard, decayed=len(shard.shape) > 1) for name, shard in shards.items()}
    parameters["matrix"].rate = 0.25
    rules.assign(list(parameters.values()))
    leaves = [[[parameter]] for parameter in parameters.values()]
    buckets = make_buckets(leaves, Replications.alone(alone(world).tensor), dtype, 200)
    torch.manual_seed(3)
    for parameter in parameters.values():
        parameter.data.copy_(torch.randn(parameter.shape))
    optimizer = BlockOptimizer(rules, buckets)
    weights = {name: p.detach().float().numpy().astype(np.float64) for name, p in parameters.items()}
    draw = np.random.default_rng(7)
    for step in range(10):
        rate = 0.01 * (step + 1)
        for name, parameter in parameters.items():
            gradient = draw.normal(0, 3.0 ** draw.integers(-4, 4, parameter.shape[-1:]), parameter.shape)
            gradient = gradient.astype(np.float32)
            if name == "matrix":
                gradient[2] = 0  # never a gradient
            assert parameter.gradient is not None
            parameter.gradient.copy_(torch.from_numpy(gradient * 4))
            decayed = weights[name] * (1 - DECAY * rate * parameter.treatment.decayed)
            whole = expected(name, weights[name], gradient.astype(np.float64), step + 1, rate)
            weights[name] = decayed + (whole - decayed) * parameter.rate
        optimizer.step(rate, 4.0)
        for bucket, master in zip(optimizer.buckets, optimizer.masters, strict=True):
            assert isinstance(master, torch.Tensor)
            for segment in bucket.segments:
                name, found = segment.parameter.shard.name, segment.view(master)
                np.testing.assert_allclose(found.numpy(), weights[name], rtol=2e-5, atol=2e-6)
                assert torch.equal(segment.parameter.detach(), found.to(dtype))
    assert optimizer.updates == 10
    return optimizer


def held(training: Trainer) -> int:
    """Bytes of state beside parameters."""
    kept = [each.values for each in training.engine.optimizer.state() if each.kind != MODEL]
    return storage_bytes(kept)  # type: ignore[arg-type]


def trains_as_one(world: World, name: str, *keys: str) -> None:
    """The layout trains as one rank does, and the rank that holds most holds what is planned."""
    ranks, layout = LAYOUTS[name]
    if ranks != world.size:
        pytest.skip(f"of {ranks} ranks")
    deck = small_deck(*LLAMA, *layout, *keys)
    training, single = trainer(world, deck), reference(world, deck)
    losses = [step.loss for step in single.train(4)]
    assert losses[-1] < losses[0]
    assert [step.loss for step in training.train(4)] == pytest.approx(losses, rel=1e-5)
    whole = single.parameters()
    for bucket in training.engine.buckets:
        flat = bucket.gathered(bucket.own_values)
        for segment in bucket.segments:
            shard = segment.parameter.shard
            if shard.name.endswith("key.bias"):
                continue  # which softmax does not see: its gradient is rounding
            apart = (segment.view(flat) - shard.take(whole[shard.name])).abs().max()
            assert apart <= 1e-4 * whole[shard.name].abs().max(), shard.name
    for compute in ("fp32", "bf16"):
        typed = small_deck(*LLAMA, *layout, *keys, f"precision.compute={compute}")
        planned = plan_memory(typed, world.size, 61).stages[training.stage].memory.optimizer
        found = world.everyone.all_gather_object(held(trainer(world, typed)))
        if deck.layout.pipeline > 1:
            assert planned == found[world.rank]
        else:  # of the rank that holds most but for cells
            assert planned in found and (compute == "fp32" or planned >= 0.98 * max(found)), found


def goes_on(world: World, folder: Path, *keys: str) -> Mapping[str, np.ndarray]:
    """A run goes on on another layout with the same bits, and then makes the same steps; what was stored."""
    both = ("layout.zero=3", "layout.tensor=2") if world.size > 1 else ("layout.zero=0", "run.seed=5")
    decks = [small_deck(*LLAMA, *EXPERTS, *keys, each, f"run.dir={folder / each}") for each in both]
    first, second = (trainer(world, deck) for deck in decks)
    first.train(3)
    paths: list[Path] = []
    for deck, training in zip(decks, (first, second), strict=True):
        checkpoints = Checkpoints(deck, training.engine, {})
        if paths:
            training.state = checkpoints.restore(paths[0])
        checkpoints.save(training.state)
        assert checkpoints.newest is not None
        paths.append(checkpoints.newest)
    before, after = map(contents, paths)
    assert before.keys() == after.keys()
    assert all(values.tobytes() == after[name].tobytes() for name, values in before.items())
    expected = [step.loss for step in first.train(2)]
    assert [step.loss for step in second.train(2)] == pytest.approx(expected, rel=1e-4)
    return before


def replicas_meet(world: World, *keys: str) -> None:
    """Replicas that part have state of their own, and the same weights where they meet."""
    training = trainer(world, small_deck(*LLAMA, *keys, "layout.replicas=2", "communication.local_steps=2"))
    training.train(2)
    optimizer = training.engine.optimizer
    for master in optimizer.masters:
        assert isinstance(master, torch.Tensor)
        both = world.everyone.all_gather(master[None])
        assert torch.equal(both[0], both[1])
    kept = [each for each in optimizer.state() if each.kind == "optimizer/exp_avg_sq"]
    assert kept and all(each.of_replicas and each.shard.shape[0] == 2 for each in kept)
    apart = []
    for each in kept:
        assert isinstance(each.values, torch.Tensor)
        both = world.everyone.all_gather(each.values[None])
        apart.append(not torch.equal(both[0], both[1]))
    assert any(apart)


def frozen_stay(world: World, *keys: str) -> None:
    """What is frozen is not updated, nor what else depends on it."""
    training = trainer(world.alone(), small_deck(*LLAMA, *keys, 'model.frozen=["blocks.0.*"]'))
    before = {name: values.clone() for name, values in training.parameters().items()}
    training.train(2)
    same = {name for name, values in training.parameters().items() if torch.equal(values, before[name])}
    assert same == {name for name in before if name.startswith("blocks.0.")}
