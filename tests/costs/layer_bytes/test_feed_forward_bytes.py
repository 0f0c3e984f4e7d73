"""Temporary bytes of feed-forward layers: what torch allocates in a step beside activations."""

from __future__ import annotations

from itertools import accumulate

import pytest
from torch.profiler import ProfilerActivity, profile

from hpctrain.comm.world import World
from hpctrain.costs.layer_bytes.byte_functions import workspace_bytes
from hpctrain.costs.part_bytes import part_bytes
from tests.engines import LLAMA, Trainer, small_deck, trainer

WIDE = ("model.hidden=128", "model.layers=1", "model.heads=2", "batch.sequence=64", "batch.micro_size=4")


def allocated_bytes(training: Trainer) -> int:
    """Return the largest number of bytes that torch allocates at once in a step."""
    training.train(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training.train(1)
    events = profiler.profiler.kineto_results.events()
    sizes: list[int] = [each.nbytes() for each in events if each.name() == "[memory]"]
    return max(accumulate(sizes))


@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_workspace_is_what_torch_allocates(world: World, family: tuple[str, ...], compute: str) -> None:
    """The gradient of a wide projection is computed when what the layer saves is gone."""
    keys = (*family, "model.mlp=2048", f"precision.compute={compute}", "machine.products=library")
    deck = small_deck(*WIDE, *keys)
    training = trainer(world, deck)
    allocated = allocated_bytes(training)
    (part,) = part_bytes(deck, training.engine.stage.models, False, "none")
    training.engine.close()
    # By then what the head saves is gone.
    planned = part.total_bytes - part.head + workspace_bytes(part.blocks[0], part.sizes)
    assert allocated == pytest.approx(planned, rel=0.05)
