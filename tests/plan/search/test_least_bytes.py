"""What ranks hold at the least: never more than the plan says, on any layout, and for plain ones near it.

Tests of plan/search/least_bytes.py, plan/search/memory_needs.py, plan/search/coarse_bounds.py and
plan/search/model_partition.py, and of what plan/search/layout_tree.py leaves out by them.
"""

from __future__ import annotations

from random import Random

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.time.machine_rates import MachineRates, parse_machine
from tests.plan.search.random_layouts import DECK, MODELS, bare, draw, layouts, tree_of
from tests.plan.time.test_machine_rates import FILE

FORMATS = FILE + "[machine.products.bf16]\npeak = 1e11\nefficiency = 0.8\nsaturation = 100.0\n"
SEEDS = 8
"""For each kind of model."""


def machine_of(per_node: int, shared: bool = False) -> MachineRates:
    own = f"memory = 1e9\ndisk = 1e9\nshared_memory = {str(shared).lower()}"
    nodes = f"ranks_per_node = {per_node}"
    return parse_machine(FORMATS.replace("memory = 1e9", own).replace("ranks_per_node = 4", nodes), "")


def planned(deck: Deck, ranks: int) -> MemoryPlan:
    return bare(deck, ranks).plan(deck)


def is_left(deck: Deck, ranks: int, machine: MachineRates, limit: float) -> bool:
    """Whether a tree in which a rank may hold so much has the layout that a deck gives."""
    group = deck.layout.zero_group
    return any(each.deck.layout.zero_group == group for each in layouts(tree_of(deck, ranks, machine, limit)))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_layout_that_fits_is_left_out(model: str, seed: int) -> None:
    random = Random(f"{model} {seed}")
    ranks, per_node = random.choice((8, 16, 32)), random.choice((1, 4, 6, 8))
    machine = machine_of(per_node, shared=random.random() < 0.5)
    frozen = random.choice(((), (), ('model.frozen=["embedding.*"]',)))
    deck = draw(random, machine, ranks, model, *frozen)
    together = bare(deck, ranks).ranks_on_node(deck)
    needed = planned(deck, ranks).max_node_bytes(together) / together
    assert is_left(deck, ranks, machine, needed), deck.layout
    assert not is_left(deck, ranks, machine, 1.0)


PLAIN = {
    "alone": (),
    "data": ("layout.zero=0",),
    "zero 1": ("layout.zero=1",),
    "zero 2": ("layout.zero=2",),
    "zero 3": ("layout.zero=3",),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "context": ("layout.context=2", "layout.zero=1"),
    "pipeline": ("layout.pipeline=4",),
    "interleaved": ("layout.pipeline=2", "layout.schedule=interleaved", "layout.chunks=2"),
    "zb-h2": ("layout.pipeline=2", "layout.schedule=zb-h2"),
    "dualpipe-v": ("layout.pipeline=2", "layout.schedule=dualpipe-v", "layout.chunks=2"),
    "again": ("memory.recompute=full", "layout.zero=1"),
}


@pytest.mark.parametrize("layout", PLAIN)
def test_of_plain_layouts_most_is_told(layout: str) -> None:
    ranks, machine = (1 if layout == "alone" else 8), machine_of(1)
    given = {"layout.tensor": 1, "layout.context": 1, "layout.pipeline": 1, "layout.zero": 0}
    usual = {"layout.schedule": "1f1b", "layout.chunks": 1, "memory.recompute": "none"}
    homes = {"memory.activations": "keep", "memory.optimizer": "device", "batch.micro_size": 2}
    written = [f"{key}={value}" for key, value in (given | usual | homes).items()]
    deck = machine.fill_deck(parse_deck(DECK, [*written, "layout.sequence_parallel=false", *PLAIN[layout]]))
    of_stages = [stage.memory for stage in planned(deck, ranks).stages]
    most = max(each.parameter + each.gradient + each.optimizer + each.activation for each in of_stages)
    assert is_left(deck, ranks, machine, max(each.total for each in of_stages))
    assert not is_left(deck, ranks, machine, 0.8 * most)
