"""Common part of tests of matrix rules: ten updates of parameters without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from hpctrain.comm.world import World
from hpctrain.optim.matrix.matrix_optimizer import MatrixOptimizer
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.sharding.replication import Replications
from tests.engines import alone, make_buckets

SHAPES = {"query": (8, 6), "matrix": (5, 7), "norm": (6,), "experts": (3, 2, 4, 5)}
HEAD = 4
Update = Callable[[str, np.ndarray, np.ndarray, int, float], np.ndarray]
"""Function of (name, weights, gradient, t, rate) that returns new weights and keeps its own state."""

DECAY = 0.3


def ten_updates(world: World, dtype: torch.dtype, rules: MatrixRules, expected: Update) -> MatrixOptimizer:
    """Ten steps of the parameters above, whose matrices are decayed, are those that `expected` makes. One of
    them has a quarter of the rate, but as much decay.
    """
    shards = {name: Shard.replicated(name, shape) for name, shape in SHAPES.items()}
    shards["query"] = replace(shards["query"], unit=HEAD)
    parameters = {
        name: Parameter(shard, has_weight_decay=len(shard.shape) > 1) for name, shard in shards.items()
    }
    parameters["matrix"].learning_rate_factor = 0.25
    rules.assign(list(parameters.values()))
    leaves = [[[parameter]] for parameter in parameters.values()]
    buckets = make_buckets(leaves, Replications.of_one_rank(alone(world).tensor), dtype, 200)
    torch.manual_seed(3)
    for parameter in parameters.values():
        parameter.data.copy_(torch.randn(parameter.shape))
    optimizer = MatrixOptimizer(rules, buckets)
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
            decayed = weights[name] * (1 - DECAY * rate * parameter.update_settings.has_weight_decay)
            whole = expected(name, weights[name], gradient.astype(np.float64), step + 1, rate)
            weights[name] = decayed + (whole - decayed) * parameter.learning_rate_factor
        optimizer.step(rate, 4.0)
        for bucket, master in zip(optimizer.buckets, optimizer.masters, strict=True):
            assert isinstance(master, torch.Tensor)
            for segment in bucket.segments:
                name, found = segment.parameter.shard.name, segment.view(master)
                np.testing.assert_allclose(found.numpy(), weights[name], rtol=2e-5, atol=2e-6)
                assert torch.equal(segment.parameter.detach(), found.to(dtype))
    assert optimizer.updates == 10
    return optimizer
