"""A training has the same bits over every transport, and over gloo up to rounding errors of its sums.

Tests of comm/transports/process_group.py in whole steps: losses, norms, and all that a checkpoint has.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpctrain.comm.transports.hierarchical import HierarchicalTransport
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.world import World
from tests.comm.transports.gloo_as_nccl import use_nccl_rules
from tests.engines import LLAMA, small_deck, trainer

pytestmark = pytest.mark.mpi(min_size=2)

Trained = tuple[list[tuple[float, float]], list[Tensor]]

SIZES = ("model.layers=4", "batch.global_size=8", "batch.micro_size=1", "batch.sequence=16", "run.steps=3")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "data": (2, ()),
    "zero-1": (2, ("layout.zero=1", "precision.compute=bf16")),
    "zero-2": (2, ("layout.zero=2", *LLAMA)),
    "zero-3": (2, ("layout.zero=3", "precision.compute=bf16", *LLAMA)),
    "tensor": (2, ("layout.tensor=2", "layout.sequence_parallel=true")),
    "pipeline": (2, ("layout.pipeline=2",)),
    "zb-v": (2, ("layout.pipeline=2", "layout.schedule=zb-v", "precision.compute=bf16", "model.tied=true")),
    "interleaved": (2, ("layout.pipeline=2", "layout.schedule=interleaved", "layout.chunks=2")),
    "ring": (2, ("layout.context=2", "layout.context_form=ring", "precision.compute=bf16")),
    "context": (2, ("layout.context=2", "layout.context_form=all_to_all")),
    "muon": (2, ("layout.zero=1", "optimizer.name=muon")),
    "hybrid": (4, ("layout.zero=2", "layout.zero_group=2")),
    "both": (4, ("layout.tensor=2", "layout.zero=1")),
    "tied": (4, ("layout.pipeline=4", "model.tied=true")),
    "stages": (4, ("layout.pipeline=2", "layout.tensor=2", "layout.sequence_parallel=true", *LLAMA)),
    "longer ring": (4, ("layout.context=4", "layout.context_form=ring", "layout.zero=3", *LLAMA)),
}

OVER_PROCESS_GROUPS = LAYOUTS | {
    "experts": (2, ("layout.expert=2", "model.experts.count=4", "model.experts.mlp=16", *LLAMA)),
    "offload": (2, ("layout.zero=3", "memory.optimizer=disk", "memory.parameters=disk", *LLAMA)),
    "local steps": (
        2,
        (
            "layout.local_steps.replicas=2",
            "layout.local_steps.steps=2",
        ),
    ),
}

OF_NODES: dict[str, tuple[str, ...]] = {
    "data": (),
    "zero-1": ("layout.zero=1", "precision.compute=bf16"),
    "zero-2": ("layout.zero=2", *LLAMA),
    "zero-3": ("layout.zero=3", "precision.compute=bf16", *LLAMA),
    "tensor": ("layout.tensor=2", "layout.zero=1"),
    "tensor over nodes": ("layout.tensor=4", "model.heads=4", "layout.sequence_parallel=true"),
    "context": ("layout.context=2", "layout.zero=3"),
    "muon": ("layout.zero=1", "optimizer.name=muon"),
}
"""On four ranks, two on each node."""


def trained(world: World, keys: tuple[str, ...]) -> Trained:
    """What some steps tell, and leave behind on this rank."""
    training = trainer(world, small_deck(*SIZES, *keys))
    told = [(result.loss, result.grad_norm) for result in training.train(3)]
    flats = [
        flat.clone()
        for bucket, state in zip(
            training.engine.stage.buckets, training.engine.stage.optimizer.states, strict=True
        )
        for flat in (bucket.owned_values, *state.values())
        if isinstance(flat, Tensor)
    ]
    return told, flats


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_and_messages_train_alike(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, keys = LAYOUTS[name]
    if ranks != world.size:
        pytest.skip(f"for {ranks} ranks")
    all_through_memory(monkeypatch)
    shared = trained(world, (*keys, "communication.transport=shared"))
    assert_same(shared, trained(world, (*keys, "communication.transport=mpi")))


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rules", ["gloo", "nccl"])
@pytest.mark.parametrize("name", OVER_PROCESS_GROUPS)
def test_process_groups_and_messages_train_alike(
    world: World, name: str, rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks with the same bits. On more, gloo adds in another order, so results differ by rounding.

    Biases of keys, whose gradients are rounding errors alone, would differ by more; LLAMA has none.

    With the rules of NCCL, gloo carries the calls of the transport for GPUs.
    """
    ranks, keys = OVER_PROCESS_GROUPS[name]
    if ranks != world.size:
        pytest.skip(f"for {ranks} ranks")
    if rules == "nccl":
        use_nccl_rules(monkeypatch, "gloo")
    gloo = trained(world, (*keys, "communication.transport=gloo"))
    expected = trained(world, (*keys, "communication.transport=mpi"))
    if world.size == 2:
        assert_same(gloo, expected)
        return
    for found, wanted in zip(gloo[0], expected[0], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    for found_flat, wanted_flat in zip(gloo[1], expected[1], strict=True):
        torch.testing.assert_close(found_flat, wanted_flat, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("name", OF_NODES)
def test_nodes_and_messages_train_alike(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_through_memory(monkeypatch)
    own, keys = World(world.communicator.Dup()), OF_NODES[name]
    of_nodes = trained(own, (*keys, "communication.transport=shared", "communication.ranks_per_node=2"))
    assert_same(of_nodes, trained(world, (*keys, "communication.transport=mpi")))


def all_through_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this small model, too, in rounds of a few rows."""
    monkeypatch.setattr(SharedTransport, "least_bytes", 1)
    monkeypatch.setattr(SharedTransport, "least_moved_bytes", 1)
    monkeypatch.setattr(SharedTransport, "least_message_bytes", 1)
    monkeypatch.setattr(SharedTransport, "least_visible_bytes", 1)
    monkeypatch.setattr(SharedTransport, "round_bytes", 2000)
    monkeypatch.setattr(HierarchicalTransport, "least_bytes", 1)
    monkeypatch.setattr(HierarchicalTransport, "piece_bytes", 2000)


def assert_same(one: Trained, other: Trained) -> None:
    assert one[0] == other[0]
    for ours, theirs in zip(one[1], other[1], strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
