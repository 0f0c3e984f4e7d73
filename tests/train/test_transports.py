"""A training has the same bits over every transport: losses, norms, and all that a checkpoint would have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpctrain.comm.shared import SharedTransport
from hpctrain.comm.world import World
from tests.engines import LLAMA, small_deck, trainer

pytestmark = pytest.mark.mpi(min_size=2)

SIZES = ("model.layers=4", "batch.global_size=8", "batch.micro_size=1", "batch.sequence=16", "run.steps=3")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "data": (2, ()),
    "zero-1": (2, ("layout.zero=1", "precision.compute=bf16")),
    "zero-2": (2, ("layout.zero=2", *LLAMA)),
    "zero-3": (2, ("layout.zero=3", "precision.compute=bf16", *LLAMA)),
    "tensor": (2, ("layout.tensor=2", "layout.sequence_parallel=true")),
    "pipeline": (2, ("layout.pipeline=2",)),
    "context": (2, ("layout.context=2", "layout.context_form=all_to_all")),
    "muon": (2, ("layout.zero=1", "optimizer.name=muon")),
    "hybrid": (4, ("layout.zero=2", "layout.zero_group=2")),
    "both": (4, ("layout.tensor=2", "layout.zero=1")),
}


def trained(world: World, keys: tuple[str, ...]) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """What some steps tell, and leave behind on this rank."""
    training = trainer(world, small_deck(*SIZES, *keys))
    told = [(result.loss, result.grad_norm) for result in training.train(3)]
    flats = [
        flat.clone()
        for bucket, state in zip(training.engine.buckets, training.engine.optimizer.states, strict=True)
        for flat in (bucket.own_values, *state.values())
        if isinstance(flat, Tensor)
    ]
    return told, flats


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_and_messages_train_alike(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, keys = LAYOUTS[name]
    if ranks != world.size:
        pytest.skip(f"for {ranks} ranks")
    # Of this small model, too, all goes through memory, in rounds of a few rows.
    monkeypatch.setattr(SharedTransport, "least", 1)
    monkeypatch.setattr(SharedTransport, "least_moved", 1)
    monkeypatch.setattr(SharedTransport, "seen", 1)
    monkeypatch.setattr(SharedTransport, "round_bytes", 2000)
    shared = trained(world, (*keys, "communication.transport=shared"))
    mpi = trained(world, (*keys, "communication.transport=mpi"))
    assert shared[0] == mpi[0]
    for one, other in zip(shared[1], mpi[1], strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
