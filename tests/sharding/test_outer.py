"""What replicas do with each other after an update: another Outer than the run's, against one rank alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches, MicroBatch
from hpctrain.engine.build import build_engine, make_mesh
from hpctrain.engine.stage import OUTERS
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.outer import Weights
from hpctrain.train.verify import ROUGHNESS, on_one_rank
from tests.engines import Trainer, small_deck, trainer

EVERY = 2
STEPS = 5
KEYS = ("optimizer.clip=0", "precision.compute=bf16")


class LocalSteps:
    """Local SGD (arXiv 1805.09767): each replica goes by its own samples, and weights become means."""

    def before_update(self, buckets: Sequence[Bucket]) -> None:
        """The loss was divided by the tokens of all replicas."""
        for bucket in buckets:
            bucket.own_gradients.mul_(bucket.sharding.replicas.size)

    def after_update(self, weights: Weights) -> None:
        """The mean of the replicas' weights."""
        if weights.updates % EVERY == 0:
            for bucket, master in zip(weights.buckets, weights.masters, strict=True):
                assert isinstance(master, torch.Tensor)
                replicas = bucket.sharding.replicas
                replicas.all_reduce(master).div_(replicas.size)
            weights.publish()


class OneShare(Batches):
    """The samples of one data rank of two, for a rank that trains by itself."""

    def __init__(self, batches: Batches, rank: int) -> None:
        super().__init__(batches.source, 1)
        self.rank = rank

    def step(
        self, first_sample: int, global_size: int, data_rank: int, data_ranks: int, micro_size: int
    ) -> Iterator[MicroBatch]:
        assert (data_rank, data_ranks) == (0, 1)
        return super().step(first_sample, global_size, self.rank, 2, micro_size)


def alone_with(world: World, rank: int, batches: Batches) -> Trainer:
    """A trainer of one rank, of the samples of data rank `rank` alone."""
    deck, one = on_one_rank(small_deck(*KEYS)), world.alone()
    engine = build_engine(deck, one, make_mesh(deck, one), roughness=ROUGHNESS)
    return Trainer(deck, engine, OneShare(batches, rank))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("zero", [1, 2])
def test_replicas_that_meet_every_second_step_are_two_runs_that_do(
    world: World, monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    monkeypatch.setitem(OUTERS, "every_step", lambda *_: LocalSteps())
    deck = small_deck(*KEYS, f"layout.zero={zero}", "layout.zero_group=1")
    training = trainer(world, deck, masked=0.0)
    singles = [alone_with(world, rank, training.step.batches) for rank in range(2)]
    for step in range(1, STEPS + 1):
        training.train_step()
        for single in singles:
            single.train_step()
        if step % EVERY == 0:
            both = [single.engine.optimizer for single in singles]
            for pair in zip(*(optimizer.masters for optimizer in both), strict=True):
                mean = (pair[0] + pair[1]) / 2
                for master in pair:
                    master.copy_(mean)
            for optimizer in both:
                optimizer.publish()
        one, other = (single.parameters() for single in singles)
        for name, values in training.parameters().items():
            assert torch.equal(values, singles[world.rank].parameters()[name]), (step, name)
        assert all(torch.equal(one[name], other[name]) for name in one) == (step % EVERY == 0)
