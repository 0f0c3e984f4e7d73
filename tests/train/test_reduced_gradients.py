"""A bit that changes in a bucket's sum, while others are still to come, is found and leaves nothing behind.

Tests of train/reduced_gradients.py.
"""

from __future__ import annotations

import pytest
import torch

from hpctrain.audit.detected_fault import DetectedFault, SilentFaultError
from hpctrain.comm.world import World
from hpctrain.sharding.bucket import Bucket
from tests.engines import small_deck, trainer
from tests.train.flips import flip

LAYOUTS = {
    "data": (),
    "zero-1": ("layout.zero=1", "precision.compute=bf16"),
    "sliced": ("layout.zero=2", "memory.accumulate=sliced"),
    "zero-3": ("layout.zero=3",),
    "replicas": (
        "layout.local_steps.replicas=2",
        "layout.local_steps.steps=3",
        "layout.local_steps.outer=diloco",
    ),
    "pipeline": ("layout.pipeline=2",),
}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_changes_after_its_sum_is_found(world: World, layout: str) -> None:
    plain = trainer(world, small_deck(*LAYOUTS[layout]))
    run = trainer(world, small_deck(*LAYOUTS[layout], "stability.corruption=cheap"))
    plain.train(3)
    run.train(1)
    synchronizer, done = run.engine.stage.synchronizer, list[str]()
    after_reduction = synchronizer.after_reduction

    def flipped(bucket: Bucket) -> None:
        after_reduction(bucket)
        there = [each for each in bucket.owned_segments(bucket.owned_gradients) if each[1].numel()]
        if (
            there and not done and world.rank == 1
        ):  # the first one: others follow, and more is added to slices
            segment, values, _ = there[-1]
            flip(values, len(values) - 1, 3)
            done.append(segment.parameter.shard.name)

    synchronizer.after_reduction = flipped
    with pytest.raises(SilentFaultError) as caught:
        run.train(1)
    (name,) = world.everyone.all_gather_object(done)[1]
    what = "changed between the reduction and the update"
    assert caught.value.faults == [DetectedFault("memory", f"gradient/{name}", "synchronize", (1,), what)]
    assert caught.value.state_unchanged
    done.append(name)
    run.train(2)
    expected = plain.parameters()
    assert all(torch.equal(values, expected[name]) for name, values in run.parameters().items())


def test_what_is_nobodys_has_no_gradient(world: World) -> None:
    """It is summed with the rest: what once came into it would grow with every step."""
    run = trainer(world.single_rank_world(), small_deck())
    gaps = [(bucket, gap) for bucket in run.engine.stage.buckets for gap in bucket.layout.gaps]
    for bucket, gap in gaps:
        bucket.gradients[gap] = 1.0
    run.train(1)
    assert gaps
    assert not any(bucket.gradients[gap].any() for bucket, gap in gaps)
