"""Parameters that lie once on a node train, and are evaluated, as those that every rank has of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.transports.hierarchical import HierarchicalTransport
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.world import World
from hpctrain.sharding.bucket import await_readers
from hpctrain.sharding.pool import BufferPool
from hpctrain.train.hook import Hook
from tests.engines import LLAMA, Trainer, small_deck, trainer

pytestmark = pytest.mark.mpi(min_size=2)

SIZES = ("model.layers=3", "batch.global_size=8", "batch.micro_size=1", "batch.sequence=16")
FREE = ("optimizer.name=schedule-free",)
MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.per_token=2")
REPLICAS = ("layout.local_steps.replicas=2", "layout.local_steps.steps=2")
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "fp32": (2, ("layout.zero=2",)),
    "averaged": (2, ("layout.zero=1", *FREE)),
    "averaged, gathered": (2, ("layout.zero=3", *FREE)),
    "not finite": (2, ("layout.zero=1", "precision.compute=fp16", "precision.initial_loss_scale=16777216")),
    "8 bits": (
        2,
        ("layout.zero=3", "precision.compute=fp8", "precision.fp8=delayed", "precision.fp8_gather=true"),
    ),
    "compressed": (2, ("layout.zero=1", "communication.compress=int8")),
    "sliced": (2, ("layout.zero=3", "memory.accumulate=sliced", "memory.keep_gathered=1")),
    "disk": (2, ("layout.zero=2", "memory.optimizer=disk", "memory.offload_dir={}")),
    "both on disk": (
        2,
        ("layout.zero=3", "memory.optimizer=disk", "memory.parameters=disk", "memory.offload_dir={}"),
    ),
    "frozen": (2, ("layout.zero=3", 'model.frozen=["embedding.*", "blocks.1.*"]', "model.tied=false")),
    "experts": (2, ("layout.zero=1", *MIXTURE)),
    "blocks": (2, ("layout.zero=3", "optimizer.name=muon")),
    "tied ends": (4, ("layout.zero=1", "layout.pipeline=2", "layout.schedule=zb-h1", "model.tied=true")),
    "replicas": (4, ("layout.zero=1", *REPLICAS)),
    "replicas, gathered": (4, ("layout.zero=3", *REPLICAS, "layout.local_steps.delay=1")),
    "experts apart": (4, ("layout.zero=2", "layout.expert=2", *MIXTURE)),
    "parts": (4, ("layout.zero=3", "layout.zero_group=2")),
}


class Late(Hook):
    """Delay one rank after another, before it computes and before it updates."""

    def __init__(self, training: Trainer) -> None:
        self.world, self.count = training.world, 0
        executor: Any = training.step.executor
        run = executor.run

        def late(*arguments: Any, **options: Any) -> Tensor:
            self.before_update()
            sums: Tensor = run(*arguments, **options)
            return sums

        executor.run = late

    def before_update(self) -> None:
        """See Hook."""
        self.count += 1
        if self.count % self.world.size == self.world.rank:
            time.sleep(0.02)


def trained(world: World, *keys: str) -> tuple[Trainer, list[tuple[float, ...]], list[Tensor]]:
    """Return a trainer, the results of some steps and evaluations, and this rank's state after them."""
    training = trainer(world, small_deck(*SIZES, *keys))
    training.hooks.append(Late(training))
    told = []
    for _ in range(4):
        result = training.train_step()
        evaluated = training.evaluate(training.step.batches, 4)["loss"]
        told.append((result.loss, result.grad_norm, evaluated))
    flats = [
        flat.clone() if isinstance(flat, Tensor) else flat.load()
        for bucket, state in zip(
            training.engine.stage.buckets, training.engine.stage.optimizer.states, strict=True
        )
        for flat in (bucket.owned_values, *state.values())
    ]
    return training, told, flats


@pytest.mark.parametrize("name", CASES)
def test_shared_parameters_are_those_of_each_rank(world: World, name: str, mpi_tmp_path: Path) -> None:
    ranks, keys = CASES[name]
    if ranks != world.size:
        pytest.skip(f"for {ranks} ranks")
    keys = tuple(key.format(mpi_tmp_path) if "{}" in key else key for key in keys)
    training, told, flats = trained(world, *keys, "communication.transport=shared")
    shared = {bucket.sharers for bucket in training.engine.stage.buckets}
    assert shared == {
        1 if name == "both on disk" else bucket.sharding.group.size
        for bucket in training.engine.stage.buckets
    }
    training.engine.close()
    training, expected, values = trained(world, *keys, "communication.transport=mpi")
    assert {bucket.sharers for bucket in training.engine.stage.buckets} == {1}
    training.engine.close()
    assert str(told) == str(expected)  # of a step without an update the norm is no number
    for one, other in zip(flats, values, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    "keys",
    [
        ("layout.zero=1", *FREE),
        ("layout.zero=2", "precision.compute=bf16"),
        ("layout.zero=1", *MIXTURE),
        ("layout.zero=1", "optimizer.name=muon", "model.tied=false"),
        ("layout.zero=3", "precision.compute=bf16"),
    ],
)
def test_each_of_several_nodes_shares_its_parameters(
    world: World, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node stores them once, except for slices of ZeRO-3. Small buckets are shared, too."""
    monkeypatch.setattr(HierarchicalTransport, "least_bytes", 1)
    nodes = ("communication.transport=shared", f"communication.ranks_per_node={world.size // 2}")
    training, told, flats = trained(world, *keys, *nodes)
    sharers = 1 if "layout.zero=3" in keys else world.size // 2
    for bucket in training.engine.stage.buckets:
        host = bucket.sharding.group.host
        assert isinstance(host, HierarchicalTransport) and bucket.sharers == sharers
        assert isinstance(bucket.owned_values, Tensor)
        assert host.links.memory.is_common(bucket.owned_values, host.links.local.users) == (sharers > 1)
    training.engine.close()
    training, expected, values = trained(world, *keys, "communication.transport=mpi")
    training.engine.close()
    assert told == expected
    for one, other in zip(flats, values, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_node_stores_shared_values_once(world: World, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of all ranks are views of the same bytes, and stage 3 gathers into the same memory."""
    taken, take = list[torch.dtype](), BufferPool.take

    def noted(pool: BufferPool, length: int, dtype: torch.dtype) -> Tensor:
        taken.append(dtype)
        return take(pool, length, dtype)

    monkeypatch.setattr(BufferPool, "take", noted)
    keys = (f"layout.zero={zero}", "communication.transport=shared", "precision.compute=bf16")
    training = trainer(world, small_deck(*SIZES, *keys))
    training.train_step()
    group = training.engine.stage.buckets[0].sharding.group
    assert isinstance(group.host, SharedTransport)
    places = []
    for bucket in training.engine.stage.buckets:
        assert isinstance(bucket.owned_values, Tensor)
        place = group.host.memory.find(bucket.owned_values)
        begin = bucket.owned_values.storage_offset() * bucket.owned_values.element_size()
        places.append((place.owner, place.offset - begin) if place else group.rank)
    everybody = group.all_gather_object(places)
    assert all((each == places) == (zero > 0 or rank == group.rank) for rank, each in enumerate(everybody))
    assert torch.bfloat16 not in taken


def test_no_rank_changes_values_that_others_still_read(world: World) -> None:
    training = trainer(world, small_deck(*SIZES, "layout.zero=1", "communication.transport=shared"))
    buckets = training.engine.stage.buckets
    before = [bucket.values.clone() for bucket in buckets if bucket.values is not None]
    if world.rank == world.size - 1:
        time.sleep(0.05)
    for bucket, values in zip(buckets, before, strict=True):
        assert bucket.values is not None and torch.equal(bucket.values, values)
    await_readers(buckets)
    for bucket in buckets:
        assert isinstance(bucket.owned_values, Tensor)
        bucket.owned_values.fill_(world.rank)
    await_readers(buckets)
    for bucket in buckets:
        assert bucket.values is not None
        parts = bucket.values.split(bucket.layout.sizes or len(bucket.values) // world.size)
        assert [part.unique().tolist() for part in parts if len(part)] == [
            [float(rank)] for rank, part in enumerate(parts) if len(part)
        ]
