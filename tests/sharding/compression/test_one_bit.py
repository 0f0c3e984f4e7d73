"""Compare 1-bit Adam with NumPy, with the updates of AdamW."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.engine.stages.update_rules import compression_settings
from hpctrain.sharding.compression.methods import make_reduction
from tests.engines import small_deck, trainer
from tests.sharding.compression.given import ODD, Array, fill, given, own_of
from tests.sharding.compression.test_compressed_reduction import sign

WARMUP, STEPS, RATE = 3, 10, 0.01
KEYS = ("communication.compress=onebit", f"communication.warmup={WARMUP}", "optimizer.clip=0")


def trained(values: Array, name: str, ranks: int, decay: float) -> Array:
    """Return a parameter after ten steps."""
    values, length = values.copy(), len(values)
    mean, square = np.zeros(length, np.float32), np.zeros(length, np.float32)
    parts = np.zeros((ranks, length), np.float32)  # of the momentum
    residuals, own_residual = np.zeros((ranks, length), np.float32), np.zeros(length, np.float32)
    first, second = np.float32(0.9), np.float32(0.95)
    for step in range(STEPS):
        gradients = [given(name, length, rank, step) for rank in range(ranks)]
        if step < WARMUP:
            summed = np.sum(gradients, 0, np.float32)
            mean = first * mean + (1 - first) * summed
            parts = first * parts + (1 - first) * np.array(gradients)
            square = second * square + (1 - second) * summed**2
        else:
            total = np.zeros(length, np.float32)
            for gradient, part, residual in zip(gradients, parts, residuals, strict=True):
                local = first * part + (1 - first) * gradient + residual
                sent = sign(local)
                residual[:] = local - sent
                total += sent
            total += own_residual
            mean = sign(total)
            own_residual = total - mean
            parts[:] = mean / ranks
        corrected = mean / (1 - first ** (step + 1))
        size = np.sqrt(square / (1 - second ** min(step + 1, WARMUP))) + np.float32(1e-8)
        values *= 1 - np.float32(RATE * decay)
        values -= np.where(square > 0, np.float32(RATE) * corrected / size, 0)
    return values


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("keys", [(), ("layout.zero=1",)], ids=str)
def test_updates_are_those_of_numpy(world: World, keys: tuple[str, ...]) -> None:
    deck = small_deck(*ODD, *KEYS, *keys)
    training = trainer(world, deck)
    engine = training.engine
    before = {name: values.numpy().reshape(-1).copy() for name, values in training.parameters().items()}
    summations = [make_reduction(compression_settings(deck), bucket) for bucket in engine.stage.buckets]
    for step in range(STEPS):
        for bucket, summation in zip(engine.stage.buckets, summations, strict=True):
            whole = bucket.final_gradients()
            whole.copy_(fill(bucket, world.rank, step))
            summation.begin(step)
            summation.start(whole, own_of(bucket, whole)).wait()
        engine.stage.optimizer.step(RATE, 1.0)
        for summation in summations:
            summation.end_step(True, 1.0)
    after = training.parameters()
    for bucket in engine.stage.buckets:
        for segment in bucket.segments:
            name = segment.parameter.shard.name
            decay = deck.optimizer.weight_decay if segment.parameter.has_weight_decay else 0.0
            expected = trained(before[name], name, world.size, decay)
            found = after[name].numpy().reshape(-1)
            moved = np.abs(expected - before[name]).max()
            close = np.abs(found - expected) <= 1e-3 * moved
            assert close.mean() > 0.99, (name, close.mean(), moved)
            assert moved > 0 or name == "final_norm.bias"


@pytest.mark.mpi(min_size=1, max_size=1)
def test_a_single_rank_has_exact_momentum(world: World) -> None:
    deck = small_deck(*KEYS)
    training = trainer(world, deck)
    bucket = training.engine.stage.buckets[0]
    summation = make_reduction(compression_settings(deck), bucket)
    mean = np.zeros(bucket.length, np.float32)
    for step in range(6):
        flat = fill(bucket, 0, step)
        mean = np.float32(0.9) * mean + np.float32(0.1) * flat.numpy()
        exact = flat.clone()
        summation.begin(step)
        found = summation.start(flat, flat).wait().numpy()
        np.testing.assert_allclose(found, exact.numpy() if step < WARMUP else mean, rtol=1e-4, atol=1e-6)
        summation.end_step(True, 1.0)
