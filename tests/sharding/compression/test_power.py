"""Compare PowerSGD with NumPy, and run it on several layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.fault_checks.replica_check import check_replicas
from hpctrain.parallel.random import key_of, normal
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.traffic_plan import plan_traffic
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.power import PowerSgd, orthonormal
from hpctrain.sharding.replication import Replications, ZeroSharding
from hpctrain.train.memory_ledger import MemoryLedger
from tests.engines import LLAMA, Trainer, make_buckets, small_deck, trainer
from tests.sharding.compression.given import message_elements

Array = npt.NDArray[np.float64]

SEED, RANK = 7, 3
SHAPES: Mapping[str, tuple[int, ...]] = {
    "square": (24, 24),
    "wide": (12, 60),
    "again": (12, 60),
    "convolution": (16, 4, 3, 3),
    "small": (3, 4),
    "bias": (37,),
}


def bucket_of(world: World, shapes: Mapping[str, tuple[int, ...]] = SHAPES, zero: int = 0) -> Bucket:
    """Return one bucket of parameters of these shapes on all ranks."""
    mesh = Mesh(world, {"data": world.size})
    replications = Replications(
        mesh, lambda everyone: ZeroSharding(zero, everyone, mesh.new_subgroup("data", 1))
    )
    parameters = [Parameter(Shard.replicated(name, shape)) for name, shape in shapes.items()]
    (bucket,) = make_buckets([[parameters]], replications, torch.float32, 1 << 30)
    return bucket


def gradients_of(step: int, rank: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Array]:
    """Return the gradients of one rank in one step: a part common to all ranks and steps, plus noise."""
    common, noise = np.random.default_rng(1), np.random.default_rng([2, step, rank])
    return {
        name: (common.normal(size=shape) + 0.5 * noise.normal(size=shape)).astype(np.float32).astype(float)
        for name, shape in shapes.items()
    }


def summed(bucket: Bucket, reduction: PowerSgd, given: Mapping[str, Array]) -> dict[str, Array]:
    """Return the sums of a rank's gradients in a step."""
    fill(bucket, given)
    whole = bucket.final_gradients()
    reduction.begin(0)
    work = reduction.start(whole, whole)
    work.proceed()
    assert work.wait() is whole
    found = arrays(bucket, whole)
    reduction.end_step(True, 1.0)
    return found


def fill(bucket: Bucket, given: Mapping[str, Array]) -> None:
    bucket.start_step(1)
    for segment in bucket.segments:
        gradient = segment.parameter.gradient
        assert gradient is not None
        gradient.copy_(torch.from_numpy(given[segment.parameter.shard.name]))


def arrays(bucket: Bucket, flat: Tensor) -> dict[str, Array]:
    return {s.parameter.shard.name: s.view(flat).double().numpy().copy() for s in bucket.segments}


def state_of(reduction: PowerSgd, kind: str) -> dict[str, Array]:
    return {
        tensor.shard.name: tensor.values.double().numpy().reshape(tensor.shard.local[1:])  # type: ignore[union-attr]
        for tensor in reduction.state()
        if tensor.kind == kind
    }


class Reference:
    """Algorithms 1 and 2 of the paper for one matrix of several workers, in fp64."""

    def __init__(self, name: str, shape: tuple[int, ...], workers: int, rank: int) -> None:
        n, m = shape[0], prod(shape[1:])
        numbers = normal(key_of(SEED, f"{name} reducer/q"), np.arange(m * rank, dtype=np.uint64))
        self.q = numbers.reshape(rank, m).T
        self.errors = [np.zeros((n, m)) for _ in range(workers)]

    def step(self, gradients: Sequence[Array]) -> Array:
        owed = [g.reshape(e.shape) + e for g, e in zip(gradients, self.errors, strict=True)]
        p, triangle = np.linalg.qr(sum(matrix @ self.q for matrix in owed))
        p *= np.sign(np.diag(triangle))
        self.q = sum(matrix.T @ p for matrix in owed)
        result: Array = p @ self.q.T
        self.errors = [matrix - result / len(owed) for matrix in owed]
        return result


def close(found: Array, expected: Array, tolerance: float = 1e-5) -> bool:
    return bool(np.abs(found - expected).max() <= tolerance * np.abs(expected).max())


@pytest.mark.mpi(min_size=2, max_size=4)
def test_five_steps_are_those_of_numpy(world: World) -> None:
    bucket = bucket_of(world)
    summation = PowerSgd(bucket, RANK, SEED)
    factored = [name for name in SHAPES if name not in {"small", "bias"}]
    references = {name: Reference(name, SHAPES[name], world.size, RANK) for name in factored}
    for step in range(5):
        given = [gradients_of(step, rank) for rank in range(world.size)]
        found = summed(bucket, summation, given[world.rank])
        for name in SHAPES:
            parts = [each[name] for each in given]
            if name not in factored:
                exact = parts[0].astype(np.float32)
                for part in parts[1:]:
                    exact += part.astype(np.float32)
                assert found[name].astype(np.float32).tobytes() == exact.tobytes(), name
                continue
            reference = references[name]
            expected = reference.step(parts).reshape(SHAPES[name])
            assert close(found[name], expected, 1e-4), (name, step)
            factor = state_of(summation, "reducer/q")[name]
            assert close(factor.T, reference.q / np.linalg.norm(reference.q, axis=0), 1e-3), (name, step)
            owed = state_of(summation, "reducer/residual")[name].reshape(reference.errors[0].shape)
            assert close(owed, reference.errors[world.rank], 1e-4), (name, step)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_factors_of_full_rank_are_exact(world: World) -> None:
    """Ignore the threshold above which a matrix is sent in full."""
    shapes = {"tall": (200, 5), "wide": (6, 300)}
    bucket = bucket_of(world, shapes)
    summation = PowerSgd(bucket, 4, SEED)
    for stack in summation.stacks:
        stack.factor_columns = min(stack.n, stack.m)
        stack.factor = torch.from_numpy(
            np.random.default_rng(3).normal(size=(1, stack.factor_columns, stack.m))
        ).float()
    given = [gradients_of(0, rank, shapes) for rank in range(world.size)]
    fill(bucket, given[world.rank])
    whole = bucket.final_gradients()
    found = arrays(bucket, summation.start(whole, whole).wait())
    for name in shapes:
        assert close(found[name], sum(each[name] for each in given), 2e-6), name


@pytest.mark.mpi(min_size=1, max_size=2)
def test_sums_and_residuals_add_up_to_the_gradients(world: World) -> None:
    bucket = bucket_of(world)
    summation = PowerSgd(bucket, 2, SEED)
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(4):
        for rank in range(world.size):
            for name, values in gradients_of(step, rank).items():
                total[name] += values
        for name, values in summed(bucket, summation, gradients_of(step, world.rank)).items():
            total[name] -= values
    owed = state_of(summation, "reducer/residual")
    for name in owed:
        if not owed[name].any():
            continue
        left = torch.from_numpy(owed[name]).contiguous()
        world.everyone.all_reduce(left)
        assert close(left.numpy().reshape(SHAPES[name]), total[name], 1e-5), name
    assert {name for name in owed if owed[name].any()} == {"square", "wide", "again", "convolution"}


@pytest.mark.mpi(min_size=1, max_size=2)
def test_residuals_of_vectors_are_added_to_the_first_sums(world: World) -> None:
    """Start like a run that resumes from one with another method, which left residuals of vectors."""
    bucket = bucket_of(world)
    summation = PowerSgd(bucket, 2, SEED)
    for tensor in summation.state():
        if tensor.kind == "reducer/residual" and tensor.shard.name == "bias":
            tensor.values[:] = 3.0
    once = summed(bucket, summation, gradients_of(0, world.rank))["bias"]
    again = summed(bucket, summation, gradients_of(0, world.rank))["bias"]
    assert close(once, again + 3 * world.size)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_matrices_without_gradients_stay_zero_until_they_have_some(world: World) -> None:
    """Test a zero matrix, one with rows and columns of zeros, and one of lower rank than its factors."""
    shapes = {"zero": (40, 30), "sparse": (41, 31), "line": (42, 32)}
    bucket = bucket_of(world, shapes)
    summation = PowerSgd(bucket, 4, SEED)
    given = {name: np.zeros(shape) for name, shape in shapes.items()}
    full = gradients_of(0, world.rank, shapes)
    given["sparse"][::2, ::3] = full["sparse"][::2, ::3]
    given["line"] = np.outer(np.arange(42.0), np.arange(32.0))
    for _ in range(3):
        found = summed(bucket, summation, given)
        assert not found["zero"].any()
        assert found["sparse"][::2, ::3].any()
        assert not found["sparse"][1::2].any() and not found["sparse"][:, 1::3].any()
        assert close(found["line"], world.size * given["line"])
    # From now on they have full rank, and all columns have something to do.
    for _ in range(2):
        summed(bucket, summation, full)
        found = summed(bucket, summation, full)
    for name in shapes:
        assert np.linalg.matrix_rank(found[name], 1e-3 * np.linalg.norm(found[name])) == 4, name


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_leave_finite_state(world: World, bad: float) -> None:
    bucket = bucket_of(world)
    summation, other = PowerSgd(bucket, RANK, SEED), PowerSgd(bucket, RANK, SEED)
    given = gradients_of(0, 0)
    given["wide"][3, 4] = bad
    fill(bucket, given)
    whole = bucket.final_gradients()
    assert not bool(summation.start(whole, whole).wait().isfinite().all())
    summation.end_step(False, 0.5)
    for step in range(2):
        found = summed(bucket, summation, gradients_of(step, 0))
        expected = summed(bucket, other, gradients_of(step, 0))
        assert all(found[name].tobytes() == expected[name].tobytes() for name in SHAPES)
    before = state_of(summation, "reducer/residual")
    before = {name: values.copy() for name, values in before.items()}
    summation.end_step(True, 2.0)
    after = state_of(summation, "reducer/residual")
    assert all((after[name] == 2 * before[name]).all() for name in before) and before["wide"].any()


@pytest.mark.mpi(min_size=1, max_size=1)
def test_there_are_no_residuals_without_feedback(world: World) -> None:
    bucket = bucket_of(world)
    summation = PowerSgd(bucket, RANK, SEED, feedback=False)
    given = gradients_of(0, 0)
    left, _, right = np.linalg.svd(given["wide"], full_matrices=False)
    best = (left[:, :RANK] * [3.0, 2.0, 1.0]) @ right[:RANK]
    given["wide"] = best + 0.1 * left[:, RANK:] @ right[RANK:]
    for _ in range(4):
        found = summed(bucket, summation, given)
    assert close(found["wide"], best, 1e-3)
    assert {tensor.kind for tensor in summation.state()} == {"reducer/q"}


def test_columns_are_orthonormal_however_similar_they_were() -> None:
    """Test columns of lengths from 1e-8 to 1e8, nearly parallel, repeated, and zero."""
    draw = np.random.default_rng(5)
    plain = draw.normal(size=(3, 50, 4)) * [1e-8, 1.0, 1e3, 1e8]
    near = plain[:1] * 0 + draw.normal(size=(1, 50, 1)) + 1e-3 * draw.normal(size=(1, 50, 4))
    doubled = plain.copy()
    doubled[:, :, 2] = doubled[:, :, 0]
    doubled[:, :, 3] = 0
    stacks = [torch.from_numpy(each).float() for each in (plain, near, doubled, plain[:, :, :2])]
    found = [each.double().numpy() for each in orthonormal(stacks)]
    for each, given in zip(found, stacks, strict=True):
        assert each.shape == tuple(given.shape)
    for each in (found[0], found[1], found[3]):
        assert np.abs(each.swapaxes(1, 2) @ each - np.eye(each.shape[-1])).max() < 1e-6
    assert np.abs(found[2].swapaxes(1, 2) @ found[2] - np.diag([1, 1, 0, 0])).max() < 1e-6
    span, _ = np.linalg.qr(stacks[1][0].double().numpy())
    assert np.abs(found[1][0] - span @ (span.T @ found[1][0])).max() < 1e-6


@pytest.mark.mpi(min_size=2, max_size=2)
def test_the_ledger_counts_factors_and_vectors(world: World) -> None:
    bucket = bucket_of(world)
    summation = PowerSgd(bucket, RANK, SEED)
    world.ledger.reset()
    summed(bucket, summation, gradients_of(0, world.rank))
    (row,) = world.ledger.rows()
    factors = RANK * (24 + 24 + 12 + 60 + 12 + 60 + 16 + 36)
    assert (row.operation, row.calls, row.bytes) == ("all_reduce", 2, 2 * 4 * (factors + 12 + 37))
    assert summation.messages == message_elements(SHAPES.values(), RANK)
    assert sum(summation.messages) == factors + 12 + 37


POWER = ("communication.compress=powersgd", "communication.powersgd.rank=2")
EXPERTS = (*LLAMA, "model.experts.count=4", "model.experts.per_token=2", "model.experts.mlp=24")


def run(world: World, *keys: str, steps: int = 3) -> tuple[Trainer, list[float]]:
    training = trainer(world, small_deck(*keys))
    losses = [step.loss for step in training.train(steps)]
    check_replicas(training.engine.stage.buckets, world.everyone)
    return training, losses


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("precision.compute=bf16", "precision.gradients=compute", "model.dropout=0.1"),
        ("layout.context=2", *LLAMA),
        ("model.frozen=['embedding.*', 'blocks.0.*']", "model.tied=false"),
        EXPERTS,
    ],
    ids=["plain", "bf16", "context", "frozen", "experts"],
)
def test_zero_1_trains_like_zero_0(world: World, keys: tuple[str, ...]) -> None:
    """The results have the same bits, and differ from those of exact sums."""
    whole, losses = run(world, *POWER, *keys)
    cut, of_slices = run(world, *POWER, *keys, "layout.zero=1")
    assert of_slices == losses
    parameters = whole.parameters()
    for name, values in cut.parameters().items():
        assert torch.equal(values, parameters[name]), name
    _, exact = run(world, *keys)
    assert exact != losses and exact == pytest.approx(losses, rel=0.1)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_sums_are_exact_if_factors_are_not_smaller(world: World) -> None:
    _, losses = run(world, "communication.compress=powersgd", "communication.powersgd.rank=32")
    assert losses == run(world)[1]


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(
    "keys",
    [
        ("layout.pipeline=2", "model.tied=true"),
        ("layout.pipeline=2", "layout.zero=1", "model.hidden=40"),
        ("layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.tensor=2", *LLAMA, "model.key_value_heads=1"),
        ("layout.expert=2", *EXPERTS),
    ],
    ids=["pipeline", "slices", "sequence", "shared", "experts"],
)
def test_ranks_with_the_same_piece_get_the_same_bits(world: World, keys: tuple[str, ...]) -> None:
    """Compare ends of tied embeddings, and tensor ranks with the same norms or heads."""
    _, losses = run(world, *POWER, *keys, "batch.global_size=16")
    _, exact = run(world, *keys, "batch.global_size=16")
    assert exact != losses and exact == pytest.approx(losses, rel=0.1)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_skipped_steps_do_not_change_residuals(world: World) -> None:
    """Start with a loss scale that is too large."""
    keys = ("precision.compute=fp16", "precision.initial_loss_scale=16777216", "run.steps=20")
    training = trainer(world, small_deck(*POWER, *keys))
    skipped = [result.skipped for result in training.train(12)]
    assert skipped[0] and not all(skipped[-2:]), skipped
    scale = training.engine.control.loss_scale.value
    owed = [each.values for each in training.engine.state() if each.kind == "reducer/residual"]
    largest = max(float(values.abs().max()) for values in owed if isinstance(values, Tensor))
    assert 0 < largest / scale < 1e-1


@pytest.mark.mpi(min_size=2, max_size=2)
def test_residuals_and_factors_are_planned(world: World, tmp_path: Path) -> None:
    for keys in ((), ("layout.zero=1", "precision.compute=bf16"), ("communication.error_feedback=false",)):
        deck = small_deck(*POWER, *keys)
        training = trainer(world, deck)
        world.ledger.reset()
        training.train(1)
        moved = sum(row.bytes for row in world.ledger.rows() if row.axis == "data x context")
        assert moved == plan_traffic(deck, world.size, 61).stages[0].payload()["data x context"]
        planned = plan_memory(deck, world.size, 61)
        held = MemoryLedger(training, planned, tmp_path).measure()
        assert held.optimizer == planned.stages[0].memory.optimizer, keys
        without = plan_memory(deck.with_keys(communication={"compress": "none"}), world.size, 61)
        beside = sum(each.values.nbytes for each in training.engine.state() if "reducer" in each.kind)
        assert held.optimizer == without.stages[0].memory.optimizer + beside > beside > 0
