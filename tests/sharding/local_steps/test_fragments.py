"""Fragments and their schedule: each element is in one fragment, and blocks are the same on every layout."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.sharding.local_steps.fragments import FragmentSchedule
from hpctrain.sharding.local_steps.local_steps import LocalSteps
from tests.engines import small_deck, trainer


def test_fragments_take_turns() -> None:
    timing = FragmentSchedule(6, 3, delay=2, warmup=4)
    assert {step: timing.begin(step) for step in range(1, 14) if timing.begin(step)} == {
        6: [0],
        8: [1],
        10: [2],
        12: [0],
    }
    assert {step: timing.due(step) for step in range(1, 14) if timing.due(step)} == {8: [0], 10: [1], 12: [2]}
    for updates in range(1, 40):
        due = [(step, each) for step in range(1, updates + 1) for each in timing.due(step)]
        met = [max([min(4, updates), *(s - 2 for s, each in due if each == f)]) for f in range(3)]
        assert timing.updates_since_sync(updates) == [updates - each for each in met]
    assert [step for step in range(1, 9) if FragmentSchedule(2).begin(step)] == [2, 4, 6, 8]
    assert [FragmentSchedule(1).begin(step) for step in range(1, 4)] == [[0]] * 3


@pytest.mark.mpi(min_size=1, max_size=4)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_trained_element_is_in_one_fragment(world: World, count: int) -> None:
    """The fragment of a block depends on its number alone, on every stage and with every stage of ZeRO."""
    keys = [
        "layout.local_steps.outer=diloco",
        "layout.local_steps.steps=4",
        f"layout.local_steps.fragments={count}",
    ]
    keys += ["model.layers=4", 'model.frozen=["blocks.1.*"]', "batch.global_size=16"]
    keys += {1: [], 2: ["layout.zero=1"], 4: ["layout.pipeline=2", "layout.zero=1"]}.get(world.size, [])
    engine = trainer(world, small_deck(*keys)).engine
    replica_sync = engine.stage.replica_sync
    assert isinstance(replica_sync, LocalSteps) and len(replica_sync.fragments) == count
    marks = [torch.full((b.owned_slice.stop - b.owned_slice.start,), -1) for b in engine.stage.buckets]
    counted = torch.zeros(1, dtype=torch.int64)
    for number, pieces in enumerate(replica_sync.fragments):
        for piece in pieces:
            assert (marks[piece.bucket][piece.span] == -1).all()
            marks[piece.bucket][piece.span] = number
            counted += sum(each.stop - each.start for each in piece.norm_slices)
    for bucket, mark in zip(engine.stage.buckets, marks, strict=True):
        for segment, found, _ in bucket.owned_segments(mark):
            name = segment.parameter.shard.name.split(".")
            block = int(name[1]) if name[0] == "blocks" else 0
            assert (found == (-1 if block == 1 else block % count)).all(), name
    world.everyone.all_reduce(counted)
    assert counted.item() == sum(
        parameter.numel()
        for parameter in trainer(world.single_rank_world(), small_deck(*keys[:6])).engine.model.parameters()
        if parameter.requires_grad
    )
