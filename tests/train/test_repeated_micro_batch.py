"""Micro-batches that neighbours compute, too: the same bits, unless something went wrong.

Tests of train/repeated_micro_batch.py.
"""

from __future__ import annotations

import random

import pytest

from hpctrain.comm.world import World
from hpctrain.sharding.bucket import Bucket
from hpctrain.train.repeated_micro_batch import Repetition
from hpctrain.train.trainer import Trainer
from tests.engines import small_deck, trainer
from tests.train.flips import flip

LAYOUTS: dict[str, tuple[str, ...]] = {
    "data": (),
    "zero-3": ("layout.zero=3", "precision.compute=bf16"),
    "tensor": ("layout.tensor=2",),
    "pipeline": ("layout.pipeline=2", "layout.schedule=interleaved"),
    "context": ("layout.context=2",),
    "experts": (
        "model.family=llama",
        "model.experts.count=4",
        "layout.expert=2",
        "model.experts.balance=bias",
    ),
    "dropout": ("model.dropout=0.2", "memory.recompute=full"),
    "fp8": ("precision.compute=fp8",),
    "replicas": ("layout.local_steps.replicas=2", "layout.local_steps.steps=4"),
    "diloco": (
        "layout.local_steps.replicas=2",
        "layout.local_steps.steps=2",
        "layout.local_steps.outer=diloco",
    ),
}


def compare(training: Trainer) -> list[tuple[str, tuple[int, ...]]]:
    repetition = Repetition(training.engine, training.step, training.state, training.next_batch)
    return [(fault.name, fault.ranks) for fault in repetition.compare()]


@pytest.mark.sampled(4)
@pytest.mark.mpi(max_size=4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_neighbours_have_the_same_bits_and_steps_are_as_ever(world: World, layout: str) -> None:
    if world.size == 1 and layout not in {"data", "dropout", "fp8"}:
        pytest.skip("needs two ranks")
    deck = small_deck(*LAYOUTS[layout], "batch.global_size=16")
    plain = trainer(world, deck)
    losses = [plain.train_step().loss for _ in range(3)]
    watched = trainer(world, deck)
    for loss in losses:
        assert watched.train_step().loss == loss
        if layout not in {"fp8", "experts"}:  # whose own state the guard gives back
            assert compare(watched) == []
    assert compare(watched) == []


@pytest.mark.mpi(min_size=2, max_size=4)
def test_what_came_out_otherwise_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    training = trainer(world, small_deck("batch.global_size=16"))
    training.train_step()
    wrong, draw = world.size - 1, random.Random(3)
    both = (wrong, 0), (wrong - 1, wrong)
    synchronizer = training.engine.stage.synchronizer
    synchronize, done = synchronizer._synchronize_final, list[Bucket]()

    def flipped(bucket: Bucket) -> None:
        if not done:
            done.append(bucket)
            if world.rank == wrong:
                segment = bucket.segments[0]
                flip(bucket.gradients, segment.start + draw.randrange(segment.length), draw.randrange(32))
        synchronize(bucket)

    monkeypatch.setattr(synchronizer, "_synchronize_final", flipped)
    ranks = world.everyone.all_gather_object(compare(training))
    told = sorted({(name, tuple(which)) for rank in ranks for name, which in rank})
    assert len(told) == 1
    assert told[0][1] in {tuple(sorted(each)) for each in both}
    assert told[0][0] == f"gradient/{done[0].segments[0].parameter.shard.name}"
    assert compare(training) == []
