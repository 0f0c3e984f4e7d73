"""A ReplicaSync of this test, which averages weights after updates, has the results of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches, MicroBatch
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.stage_values import load_parameters
from hpctrain.engine.stages.gradients import REPLICA_SYNCS, ReplicaSyncChoice
from hpctrain.engine.stages.stage import build_stage
from hpctrain.model.construction import build_model
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.replica_sync import SyncEveryStep, Weights
from hpctrain.sharding.state import MODEL, StateOptions, StateTensor, owned_state
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.layout_verification import NOISE_STD
from hpctrain.train.start import start_from_source
from tests.engines import Trainer, small_deck, trainer

EVERY = 2
STEPS = 5
KEYS = ("optimizer.clip=0.1", "precision.compute=bf16")


class LocalSteps(SyncEveryStep):
    """Local SGD (arXiv 1805.09767): replicas train on their own samples, and weights become means."""

    def begin(self, weights: Weights) -> None:
        """Replicas begin alike."""

    def before_update(self, buckets: Sequence[Bucket]) -> None:
        """The loss was divided by the tokens of all replicas."""
        for bucket in buckets:
            bucket.owned_gradients.mul_(bucket.sharding.replicas.size)

    def after_update(self, weights: Weights) -> Mapping[str, torch.Tensor]:
        """The mean of the replicas' weights."""
        if weights.updates % EVERY == 0:
            for bucket, master in zip(weights.buckets, weights.masters, strict=True):
                assert isinstance(master, torch.Tensor)
                replicas = bucket.sharding.replicas
                replicas.all_reduce(master).div_(replicas.size)
            weights.copy_to_parameters()
        return {}


class OneShare(Batches):
    """Samples of one of two data ranks, for a rank that trains alone."""

    def __init__(self, batches: Batches, rank: int) -> None:
        super().__init__(batches.source, 1)
        self.rank = rank

    def step(
        self, first_sample: int, global_size: int, data_rank: int, data_ranks: int, micro_size: int
    ) -> Iterator[MicroBatch]:
        assert (data_rank, data_ranks) == (0, 1)
        return super().step(first_sample, global_size, self.rank, 2, micro_size)


def alone_with(world: World, rank: int, batches: Batches) -> Trainer:
    """Return a trainer of one rank with the samples of data rank `rank`."""
    deck, one = on_one_rank(small_deck(*KEYS)), world.single_rank_world()
    engine = build_engine(deck, one, make_mesh(deck, one), noise_std=NOISE_STD)
    return Trainer(deck, engine, OneShare(batches, rank))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make replicas diverge for one step at a time."""
    choice = ReplicaSyncChoice(lambda *_: LocalSteps(), diverging=True)
    monkeypatch.setitem(REPLICA_SYNCS, "every_step", choice)  # type: ignore[misc]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("zero", [1, 2])
def test_replicas_synchronized_in_every_second_step_are_like_two_runs(world: World, zero: int) -> None:
    """Each replica is clipped by its own norm. The metric is the mean of the norms."""
    deck = small_deck(*KEYS, f"layout.zero={zero}", "layout.zero_group=1")
    training = trainer(world, deck, masked=0.0)
    singles = [alone_with(world, rank, training.step.batches) for rank in range(2)]
    for step in range(1, STEPS + 1):
        norm = training.train_step().grad_norm
        norms = [single.train_step().grad_norm for single in singles]
        assert norm == sum(norms) / 2 and norms[0] != norms[1] and min(norms) > 0.1
        if step % EVERY == 0:
            both = [single.engine.stage.optimizer for single in singles]
            for pair in zip(*(optimizer.masters for optimizer in both), strict=True):
                mean = (pair[0] + pair[1]) / 2
                for master in pair:
                    master.copy_(mean)
            for optimizer in both:
                optimizer.copy_to_parameters()
        one, other = (single.parameters() for single in singles)
        for name, values in training.parameters().items():
            assert torch.equal(values, singles[world.rank].parameters()[name]), (step, name)
        assert all(torch.equal(one[name], other[name]) for name in one) == (step % EVERY == 0)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.usefixtures("apart")
def test_diverged_replicas_are_stored_separately(world: World, mpi_tmp_path: Path) -> None:
    deck = small_deck(*KEYS, "layout.zero=1", "layout.zero_group=1", f"run.dir={mpi_tmp_path}")
    training = trainer(world, deck, masked=0.0)
    checkpoints = Checkpoints(deck, training.engine, {})
    training.train(EVERY + 1)
    checkpoints.save(training.state)
    assert checkpoints.newest is not None
    saved = {name: values.clone() for name, values in training.parameters().items()}
    assert any(not torch.equal(*world.everyone.all_gather(values[None])) for values in saved.values())
    losses = [step.loss for step in training.train(2)]
    again = trainer(world, deck, masked=0.0)
    again.state = Checkpoints(deck, again.engine, {}).restore(checkpoints.newest)
    assert all(torch.equal(values, saved[name]) for name, values in again.parameters().items())
    assert [step.loss for step in again.train(2)] == losses


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.usefixtures("apart")
def test_a_gradient_that_is_not_finite_skips_the_step_of_all_replicas(world: World) -> None:
    training = trainer(world, small_deck(*KEYS, "layout.zero=1", "layout.zero_group=1"), masked=0.0)
    before = {name: values.clone() for name, values in training.parameters().items()}
    if world.rank == 1:
        training.engine.stage.optimizer.masters[0][:1] = float("nan")
    training.engine.stage.optimizer.copy_to_parameters()
    assert training.train_step().skipped
    after = training.parameters()
    assert world.rank or all(torch.equal(values, before[name]) for name, values in after.items())


class Averaged(LocalSteps):
    """Local steps whose common model is the mean at the last synchronization."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.common = [torch.zeros(bucket.owned_slice.stop - bucket.owned_slice.start) for bucket in buckets]

    def begin(self, weights: Weights) -> None:
        for common, master in zip(self.common, weights.masters, strict=True):
            assert isinstance(master, torch.Tensor)
            common.copy_(master)

    def after_update(self, weights: Weights) -> Mapping[str, torch.Tensor]:
        super().after_update(weights)
        if weights.updates % EVERY == 0:
            self.begin(weights)
        return {}

    def state(self) -> Iterator[StateTensor]:
        for bucket, common in zip(self.buckets, self.common, strict=True):
            yield from owned_state(MODEL, common, bucket, StateOptions("always", False, diverging=False))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_common_model_of_replicas_is_the_model_of_the_checkpoint(
    world: World, monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path, compute: str
) -> None:
    """Runs with and without replicas resume from each other, and start from each other's weights."""
    keys = ("optimizer.clip=0.1", f"precision.compute={compute}", "layout.zero=1", f"run.dir={mpi_tmp_path}")
    plain_deck, apart_deck = small_deck(*keys), small_deck(*keys, "layout.zero_group=1")
    averaged = ReplicaSyncChoice(lambda _, stage: Averaged(stage.buckets), diverging=True)
    plain = trainer(world, plain_deck, masked=0.0)
    plain.train(1)
    checkpoints = Checkpoints(plain_deck, plain.engine, {})
    checkpoints.save(plain.state)

    monkeypatch.setitem(REPLICA_SYNCS, "every_step", averaged)  # type: ignore[misc]
    training = trainer(world, apart_deck, masked=0.0)
    assert checkpoints.newest is not None
    training.state = Checkpoints(apart_deck, training.engine, {}).restore(checkpoints.newest)
    assert_equal(training.parameters(), plain.parameters())
    assert [t.kind for t in training.engine.state() if t.is_weight and not t.per_replica]
    training.train(EVERY)
    assert training.engine.stage.optimizer.updates == EVERY + 1
    replica_sync = training.engine.stage.replica_sync
    assert isinstance(replica_sync, Averaged)
    common = [values.clone() for values in replica_sync.common]
    checkpoints = Checkpoints(apart_deck, training.engine, {})
    checkpoints.save(training.state)
    assert checkpoints.newest is not None
    again = trainer(world, apart_deck, masked=0.0)
    again.state = Checkpoints(apart_deck, again.engine, {}).restore(checkpoints.newest)
    assert_equal(again.parameters(), training.parameters())
    assert isinstance(again.engine.stage.replica_sync, Averaged)
    assert all(
        torch.equal(*pair) for pair in zip(again.engine.stage.replica_sync.common, common, strict=True)
    )

    deck = small_deck(*keys, "layout.zero_group=1", f"model.from={checkpoints.newest}")
    started = trainer(world, deck, masked=0.0)
    start_from_source(deck, started.engine)
    for bucket, values, expected in zip(
        started.engine.stage.buckets, started.engine.stage.optimizer.masters, common, strict=True
    ):
        assert all(
            torch.equal(mine, theirs)
            for (_, mine, _), (_, theirs, _) in zip(
                bucket.owned_segments(values), bucket.owned_segments(expected), strict=True
            )
        )

    model = build_model(plain.engine.shape, plain.engine.stage.layer_context)
    stage = build_stage(
        plain_deck, plain.engine.stage.layer_context, [model], plain.engine.stage.replications
    )
    load_parameters(checkpoints.newest, stage, world.everyone)
    generating = {parameter.shard.name: parameter for parameter in model.parameters()}

    monkeypatch.undo()
    back = trainer(world, plain_deck, masked=0.0)
    back.state = Checkpoints(plain_deck, back.engine, {}).restore(checkpoints.newest)
    alone = back.parameters()
    for bucket, expected in zip(started.engine.stage.buckets, common, strict=True):
        for segment, values, _ in bucket.owned_segments(expected):
            name = segment.parameter.shard.name
            assert torch.equal(alone[name].reshape(-1), values.to(alone[name].dtype)), name
            assert torch.equal(generating[name].detach(), alone[name]), name
    assert back.train_step().loss > 0


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(values, expected[name]) for name, values in found.items())
