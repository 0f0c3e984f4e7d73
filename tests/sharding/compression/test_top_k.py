"""Compare sums of the largest elements, and their momentum, with NumPy."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.sharding.compression.top_k import TopK
from tests.sharding.compression.given import ODD, Array, buckets_of, fill, given, own, summed

RATIO, WARMUP = 0.07, 2


class Reference:
    """Sums of one parameter: u = m u + g, v += u, and elements that are sent become zero."""

    def __init__(self, name: str, length: int, ranks: int, momentum: float) -> None:
        self.name, self.length, self.momentum = name, length, np.float32(momentum)
        self.velocity = np.zeros((ranks, length), np.float32)
        self.unsent = np.zeros((ranks, length), np.float32)

    def step(self, step: int) -> Array:
        total = np.zeros(self.length, np.float32)
        for rank, (velocity, unsent) in enumerate(zip(self.velocity, self.unsent, strict=True)):
            gradient = given(self.name, self.length, rank, step)
            velocity[:] = self.momentum * velocity + gradient
            if step < WARMUP:
                total += gradient
                continue
            unsent[:] += velocity if self.momentum else gradient
            largest = np.argsort(-np.abs(unsent), kind="stable")[: ceil(RATIO * self.length)]
            total[largest] += unsent[largest]
            unsent[largest] = velocity[largest] = 0
        return total


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("keys", [ODD, (*ODD, "layout.zero=1"), ()], ids=str)
def test_sums_are_those_of_numpy(world: World, momentum: float, keys: tuple[str, ...]) -> None:
    for bucket in buckets_of(world, *keys):
        summation = TopK(bucket, RATIO, momentum, WARMUP)
        lengths = {s.parameter.shard.name: s.length for s in bucket.segments}
        references = {name: Reference(name, n, world.size, momentum) for name, n in lengths.items()}
        for step in range(6):
            found = summed(bucket, summation, fill(bucket, world.rank, step), step)
            expected = own(bucket, {name: each.step(step) for name, each in references.items()})
            for name, values in expected.items():
                assert np.array_equal(found[name], values) or np.allclose(found[name], values, 1e-5), name
        kept = {"reducer/momentum": "velocity", "reducer/residual": "unsent"}
        for tensor in summation.state():
            expected_of_rank = getattr(references[tensor.shard.name], kept[tensor.kind])[world.rank]
            np.testing.assert_allclose(tensor.values.numpy(), expected_of_rank, rtol=1e-5, atol=1e-6)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_sent_and_unsent_elements_add_up_to_the_gradients(world: World) -> None:
    for bucket in buckets_of(world, *ODD):
        summation, everything = TopK(bucket, RATIO, 0.0, 0), np.zeros(bucket.length)
        for step in range(4):
            flat = fill(bucket, world.rank, step)
            everything += world.everyone.all_reduce(flat.double()).numpy()
            summation.begin(step)
            everything -= summation.start(flat, flat).wait().numpy()
        assert summation.unsent.any()
        kept = world.everyone.all_reduce(summation.unsent.double()).numpy()
        np.testing.assert_allclose(kept, everything, atol=1e-4)
