"""Adapters are trained alone, and alike on every layout."""

from __future__ import annotations

import re

import pytest

from hpctrain.comm.world import World
from hpctrain.engine.build import make_mesh
from hpctrain.train.miniature import miniature
from hpctrain.train.verify import compare
from tests.engines import LLAMA, small_deck

FAMILIES = {"gpt2": (), "llama": LLAMA}
ADAPTERS = ("model.adapters.rank=3", "model.adapters.alpha=5")
LAYOUTS = {
    "data": [],
    "zero 1": ["layout.zero=1"],
    "zero 2": ["layout.zero=2"],
    "zero 3": ["layout.zero=3"],
    "zero 3, sliced, computed again": ["layout.zero=3", "memory.accumulate=sliced", "memory.recompute=full"],
    "tensor": ["layout.tensor=2"],
    "sequence parallel": ["layout.tensor=2", "layout.sequence_parallel=true"],
    "context": ["layout.context=2"],
    "heads for sequence": ["layout.context=2", "layout.context_form=all_to_all", "layout.zero=3"],
    "pipeline": ["layout.pipeline=2"],
    "weight gradients later": ["layout.pipeline=2", "layout.schedule=zb-h1"],
    "selective": ["layout.tensor=2", "layout.sequence_parallel=true", "memory.recompute=selective"],
}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_step_of_every_layout_is_that_of_one_rank(world: World, family: str, layout: str) -> None:
    deck = small_deck(*FAMILIES[family], *ADAPTERS, *LAYOUTS[layout])
    differences = compare(miniature(deck), world, make_mesh(deck, world))
    seen = {difference.name for difference in differences}
    assert any(re.fullmatch(r"gradient of \S+query\.adapter\.a", name) for name in seen), seen
    for difference in differences:
        bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
        assert difference.error <= bound, difference
