"""Layouts on several kinds of node, and splits of blocks by seconds: against every split there is.

Tests of plan/search/partition_choices.py, and of plan/search/layout_tree.py on several kinds of node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import inf

import pytest

from hpctrain.deck.check import check_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import Place
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.search.layout_tree import LayoutTree
from hpctrain.plan.search.partition_choices import LEAST_GAIN
from hpctrain.plan.search.search import search
from hpctrain.plan.search.search_space import SearchSpace, with_values
from hpctrain.plan.search.tree_nodes import LayoutNode, Node
from hpctrain.plan.time.layer_seconds import LayerSizes, layer_seconds
from hpctrain.plan.time.machine_rates import MachineRates, ProductRates
from hpctrain.plan.time.step_plan import plan_step, step_seconds
from tests.costs.test_balanced_split import ways
from tests.engines import small_deck
from tests.plan.time.test_stage_nodes import FAST, ONE, SEVERAL, kinds

KEYS = ("batch.global_size=16", "memory.recompute=none", "layout.context=1", "layout.zero=1")
SLOW_MEMORY = "memory_bandwidth = 2e9\nlaunch = 1e-5\nfixed = 1e-4\n"
"""Other times than the first kind's by another factor for each layer."""


def deck_of(*keys: str) -> Deck:
    return small_deck(*KEYS, *keys)


@cache
def budget_on(ranks: int, memories: tuple[tuple[str, int, float], ...]) -> MemoryBudget:
    return MemoryBudget(ranks, 61, 2, memories)


def tree_of(deck: Deck, ranks: int, machine: MachineRates) -> LayoutTree:
    return LayoutTree(SearchSpace(deck, ranks), machine, budget_on(ranks, machine.memories), inf)


def layouts(tree: LayoutTree) -> Iterator[tuple[list[Node], LayoutNode]]:
    """All that can be, each with the nodes above it."""
    for root in tree.roots():
        for staged in tree.children(root):
            for layout in tree.children(staged):
                assert isinstance(layout, LayoutNode)
                if not check_deck(layout.deck, tree.choices.ranks):
                    yield [root, staged], layout


MACHINES = {
    "fast": kinds(FAST),
    "slow memory": kinds(SLOW_MEMORY),
    "three": kinds(FAST, SLOW_MEMORY),
    "narrow": kinds("between = { bandwidth = 1e7, latency = 1e-3 }\nmemory_bandwidth = 3e10"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_no_layout_undercuts_the_bounds_above_it(name: str) -> None:
    machine = MACHINES[name]
    for ranks in (8, 6) if name != "three" else (12,):
        tree = tree_of(deck_of("model.layers=6", "batch.global_size=48"), ranks, machine)
        seen = 0
        for above, layout in layouts(tree):
            seconds = sum(tree.seconds(layout).values())
            for node in (*above, layout):
                assert node.bound <= seconds * (1 + 1e-9), (node, layout)
            seen += 1
        assert seen > 20


def test_nor_where_each_kind_is_good_at_another_layer() -> None:
    """The first stages multiply quickly, the last ones have quick memory for the head."""
    slow_memory = SEVERAL.replace("memory_bandwidth = 1e10", "memory_bandwidth = 1e8")
    machine = kinds(
        "memory_bandwidth = 1e13\nproducts = { fp32 = { peak = 2e10 } }\n"
        "attention = { forward = 2e10, backward = 2e10 }",
        first=slow_memory.replace("between = { bandwidth = 1e9", "between = { bandwidth = 1e12"),
    )
    deck = deck_of(
        "model.layers=6",
        "model.vocabulary=500",
        "batch.global_size=512",
        "layout.zero=0",
        "layout.pipeline=2",
        "layout.tensor=1",
    )
    tree = LayoutTree(SearchSpace(deck, 8), machine, MemoryBudget(8, 500, 2), inf)
    for above, layout in layouts(tree):
        seconds = sum(tree.seconds(layout).values())
        assert all(node.bound <= seconds for node in (*above, layout))


@pytest.mark.parametrize("name", MACHINES)
def test_the_quickest_is_found(name: str) -> None:
    machine = MACHINES[name]
    deck = deck_of("model.layers=6")
    tree = tree_of(deck, 8, machine)
    expected = sorted(sum(tree.seconds(layout).values()) for _, layout in layouts(tree))
    found = search(deck, 8, machine, budget_on(8, machine.memories), 5).best
    assert [each.seconds for each in found] == pytest.approx(expected[:5])
    for each in found:
        assert each.seconds == pytest.approx(plan_step(each.deck, 8, 61, machine).seconds)


@pytest.mark.parametrize("name", MACHINES)
def test_no_other_split_has_a_shorter_longest_stage(name: str) -> None:
    """Of all splits that there are."""
    machine = MACHINES[name]
    ranks = 12 if name == "three" else 8
    for schedule in ("1f1b", "dualpipe-v"):
        stages, passes = (4, 4) if schedule == "1f1b" else (2, 4)
        deck = deck_of(
            f"layout.pipeline={stages}",
            "model.layers=7",
            "layout.tensor=1",
            f"layout.schedule={schedule}",
            f"batch.global_size={ranks // stages * passes}",
            "batch.micro_size=1",
            "layout.zero=0",
            *(["layout.chunks=2"] if schedule == "dualpipe-v" else []),
        )
        tree = tree_of(deck, ranks, machine)
        (layout,) = (layout for _, layout in layouts(tree))
        best = min(longest(tree, layout, way) for way in ways(7, tree.schedule(layout).parts))
        assert longest(tree, layout, layout.split) == pytest.approx(best)


def longest(tree: LayoutTree, layout: LayoutNode, split: tuple[int, ...]) -> float:
    """Of all stages the most that one computes in a micro-batch, with blocks split so."""
    first, *blocks, last = tree.layers
    seconds = [0.0] * layout.at.pipeline
    for number, count in enumerate(split):
        part = [blocks.pop(0) for _ in range(count)]
        part += [first] * (number == 0) + [last] * (number == len(split) - 1)
        stage = tree.schedule(layout).stage_and_chunk(number)[0]
        seconds[stage] += sum(alone(tree, layout, layer, stage) for layer in part)
    return max(seconds)


def alone(tree: LayoutTree, layout: LayoutNode, layer: LayerSizes, stage: int) -> float:
    """Seconds of a layer of a micro-batch by the slowest node under a stage, found from ranks of nodes."""
    at, nodes = layout.at, [kind for kind in tree.machine.kinds for _ in range(kind.nodes or 0)]
    ranks = range(stage * at.stage_ranks, (stage + 1) * at.stage_ranks)
    under = [nodes[rank // at.ranks_per_node] for rank in ranks]
    found = [layer_seconds(layer, at, kind) for kind in under]
    return sum(
        max(sum(getattr(each, name).values()) for each in found)
        for name in ("forward", "input_gradient", "weight_gradient")
    )


def test_stages_that_are_twice_as_fast_hold_twice_the_blocks() -> None:
    deck = deck_of("model.layers=18", "layout.pipeline=4", "layout.schedule=1f1b", "layout.tensor=1")
    best = search(deck, 8, kinds(FAST), budget_on(8, kinds(FAST).memories), 1).best[0]
    assert best.changes["layout.split"] == best.deck.layout.split == (3, 3, 6, 6)


def test_a_split_that_the_deck_gives_stays() -> None:
    deck = deck_of("model.layers=6", "layout.pipeline=2", "layout.split=[3, 3]", "layout.schedule=1f1b")
    for machine in (kinds(FAST), ONE):
        for each in search(deck, 8, machine, budget_on(8, machine.memories), 3).best:
            assert "layout.split" not in each.changes
            assert each.deck.layout.split == (3, 3)


@pytest.mark.parametrize("layers", [6, 9])
def test_kinds_that_are_alike_are_one(layers: int) -> None:
    deck, alike = deck_of(f"model.layers={layers}"), kinds("memory = 5e9")
    one, several = (
        search(deck, 8, machine, budget_on(8, machine.memories), 20).best for machine in (ONE, alike)
    )
    rows = [[(each.changes, each.seconds_by_cause) for each in found] for found in (one, several)]
    assert rows[0] == rows[1]


def test_no_node_holds_more_than_its_kind_has() -> None:
    """Half of the nodes have room for fewer blocks: what would be quickest does not fit there."""
    keys = ("model.layers=12", "model.hidden=64", "layout.pipeline=4", "layout.schedule=1f1b")
    deck = deck_of(*keys, "layout.tensor=1", "layout.zero=0", "batch.micro_size=1")
    for memory in (4e8, 1e9):
        machine = kinds(f"{FAST}\nmemory = {memory}").model_copy(update={"memory": 1e9})
        budget = budget_on(8, machine.memories)
        planned = machine.fill_deck(deck)
        (layout,) = (layout for _, layout in layouts(tree_of(deck, 8, machine)))
        demand = budget.demand(planned, tree_of(planned, 8, machine).memory(layout))
        assert demand is not None
        nodes = tree_of(planned, 8, machine).memory(layout).bytes_by_node(2, budget.shared_bytes(planned))
        limits = [2e9, 2e9, 2 * memory, 2 * memory]
        largest_demand = max(need / limit for need, limit in zip(nodes, limits, strict=True))
        assert demand.needed / demand.limit.bytes == pytest.approx(largest_demand)
        assert demand.host == "a node of kind 0" or memory == 1e9
        assert bool(search(planned, 8, machine, budget, 1).best) == demand.fits == (largest_demand <= 1)


def test_what_is_needed_at_the_least_is_told_for_the_memory_of_each_kind() -> None:
    """Of half of what the largest kind has, a bound is twice as much; never more than the plan says."""
    keys = ("model.layers=8", "model.hidden=64", "layout.schedule=1f1b", "layout.tensor=1")
    machine = kinds(f"{FAST}\nmemory = 5e8").model_copy(update={"memory": 1e9})
    deck = machine.fill_deck(deck_of(*keys))
    budget, alike = budget_on(8, machine.memories), budget_on(8, kinds(FAST).memories)
    tree, plain = (LayoutTree(SearchSpace(deck, 8), machine, each, inf) for each in (budget, alike))
    ratios = []
    for (above, layout), (_, other) in zip(layouts(tree), layouts(plain), strict=True):
        demand = budget.demand(deck, tree.memory(layout))
        assert demand is not None
        planned = tree.needs.planned(demand)
        assert all(node.least <= planned for node in (*above, layout))
        ratios.append(layout.least / other.least)
    assert ratios and 1.5 < min(ratios) <= max(ratios) <= 2


def test_a_faster_kind_makes_no_best_layout_slower() -> None:
    deck, before = deck_of("model.layers=9"), inf
    for speed in (1.2, 1.5, 2.0, 3.0, 5.0, 9.0):
        machine = kinds(FAST)
        rates = machine.others[0].products["fp32"].model_dump() | {"peak": speed * 1e11}
        faster = {"products": {"fp32": ProductRates(**rates)}, "memory_bandwidth": speed * 1e10}
        other = machine.others[0].model_copy(update=faster)
        machine = machine.model_copy(update={"others": (other,)})
        seconds = search(deck, 8, machine, budget_on(8, machine.memories), 1).best[0].seconds
        assert seconds <= before * (1 + 1e-9)
        before = seconds


def test_on_one_kind_blocks_are_split_by_seconds_where_that_pays() -> None:
    """A head of many rows, whose losses take longer than their FLOPs tell."""
    machine = ONE.model_copy(update={"memory_bandwidth": 5e8})
    deck = deck_of("layout.pipeline=2", "layout.schedule=1f1b", "model.layers=8", "model.vocabulary=2000")
    budget = MemoryBudget(2, 2000, 2)
    usual = with_values(deck, {"layout.split": None})
    places = {**deck.sources.places, "layout.split": Place("deck.toml")}
    sections = {name: getattr(usual, name) for name in type(usual).model_fields}
    usual = Deck.model_validate(sections, context=replace(deck.sources, places=places))
    plain, split = (search(each, 2, machine, budget, 3).best for each in (usual, deck))
    assert all(each.deck.layout.split is None for each in plain)
    for each in split:
        assert each.seconds == pytest.approx(plan_step(each.deck, 2, 2000, machine).seconds)
    assert isinstance(split[0].changes["layout.split"], tuple)
    assert split[0].seconds <= (1 - LEAST_GAIN) * plain[0].seconds
    assert [each.seconds for each in split] == sorted(each.seconds for each in split)
    tree = LayoutTree(SearchSpace(deck, 2), machine, budget, inf)
    size = split[0].deck.batch.micro_size
    layout, other = (node for _, node in layouts(tree) if node.at.micro_size == size)
    assert other.by_flops == layout and other.split == split[0].deck.layout.split
    every = [
        sum(step_seconds(tree.layers, layout.at, tree.schedule(layout), way, machine).values())
        for way in ways(8, 2)
    ]
    assert min(every) <= split[0].seconds <= 1.01 * min(every)
