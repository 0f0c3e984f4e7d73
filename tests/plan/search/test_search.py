"""Searches against brute force over all layouts; their bounds; what decks give; where nothing fits.

Tests of plan/search/search.py, plan/search/layout_tree.py, plan/search/layout_generator.py,
plan/search/tree_nodes.py, plan/search/search_space.py and plan/search/candidate.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import Place
from hpctrain.host.memory import MemoryLimit
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.search.layout_tree import LayoutTree
from hpctrain.plan.search.search import SearchResult, least_memory_layout, search, some_layout_fits
from hpctrain.plan.search.search_space import EVERY, SearchSpace
from hpctrain.plan.search.tree_nodes import LayoutNode, Node
from hpctrain.plan.time.machine_rates import MachineRates, read_machine
from hpctrain.plan.time.step_plan import plan_step
from tests.plan.search.brute import Brute
from tests.plan.search.random_layouts import DECK, LLAMA, MIXTURE, Bare, bare, layouts, tree_of
from tests.plan.search.test_least_bytes import machine_of

SELENE = read_machine("selene-2021")
SLOW = SELENE.model_copy(update={"between": SELENE.between.model_copy(update={"bandwidth": 1e9})})

NO_CONTEXT = {"context": 1}
KEPT = {"recompute": "none", "activations": "keep"}


@dataclass(frozen=True)
class Case:
    """A deck that gives some keys of its layout and its memory, on so many ranks of a machine, each of which
    may hold `rank_bytes` bytes.
    """

    keys: Sequence[str]
    layout: Mapping[str, object] = field(default_factory=dict)
    memory: Mapping[str, object] = field(default_factory=dict)
    rank_bytes: float = 1e12
    ranks: int = 64
    machine: MachineRates = SELENE

    @property
    def deck(self) -> Deck:
        of_node = int(self.rank_bytes * self.machine.ranks_per_node)
        keys = ("run.device=cpu", "precision.compute=bf16", f"machine.memory={of_node}", *self.keys)
        deck = self.machine.fill_deck(parse_deck(DECK, keys)).with_keys(
            layout=self.layout, memory=self.memory
        )
        given = [f"layout.{key}" for key in self.layout] + [f"memory.{key}" for key in self.memory]
        places = {**deck.sources.places, **{key: Place("deck.toml") for key in given}}
        sections = {name: getattr(deck, name) for name in type(deck).model_fields}
        return Deck.model_validate(sections, context=replace(deck.sources, places=places))


LARGE = ("model.hidden=2048", "model.heads=16", "batch.sequence=1024")
CASES = {
    "dense": Case(
        (*LARGE, "model.layers=8"),
        {**NO_CONTEXT, "sequence_parallel": False, "zero": 1, "zero_group": None},
        {**KEPT, "optimizer": "device"},
        rank_bytes=0.8e9,
    ),
    "llama": Case(
        (*LARGE, *LLAMA, "model.key_value_heads=4", "batch.micro_size=1"),
        {"pipeline": 2, "schedule": "1f1b", "chunks": 1, "zero": 0},
        {"activations": "keep", "optimizer": "device"},
        rank_bytes=0.4e9,
    ),
    "mixture": Case(
        (*MIXTURE, "batch.micro_size=1"),
        {**NO_CONTEXT, "schedule": "interleaved", "chunks": 2, "pipeline": 2, "sequence_parallel": False},
        {**KEPT, "optimizer": "device"},
        rank_bytes=0.16e9,
    ),
    "vocabulary": Case(
        ("model.vocabulary=200000", "model.tied=true", "batch.global_size=64"),
        {**NO_CONTEXT, "zero": 0, "sequence_parallel": False},
        {**KEPT, "optimizer": "device"},
        rank_bytes=0.8e9,
    ),
    "tight": Case(
        ("model.hidden=1024", "batch.global_size=64"),
        {
            **NO_CONTEXT,
            "tensor": 2,
            "sequence_parallel": True,
            "pipeline": 4,
            "schedule": "1f1b",
            "chunks": 1,
        },
        rank_bytes=0.25e9,
        machine=machine_of(8),
    ),
    "one node": Case(
        (*LLAMA, "batch.global_size=16"),
        {"zero": 1},
        {**KEPT, "optimizer": "device"},
        rank_bytes=0.4e9,
        ranks=8,
        machine=machine_of(8, shared=True),
    ),
    "slow links": Case(
        (*LARGE, "batch.global_size=64"),
        {**NO_CONTEXT, "schedule": "zb-h1", "chunks": 1, "sequence_parallel": True},
        {**KEPT, "optimizer": "device"},
        rank_bytes=0.9e9,
        machine=SLOW,
    ),
    "a heavy head": Case(
        ("model.layers=14", "model.vocabulary=80000", "batch.global_size=64"),
        {**NO_CONTEXT, "tensor": 1, "zero_group": None, "sequence_parallel": False},
        {**KEPT, "optimizer": "device"},
        ranks=16,
        machine=SELENE.model_copy(update={"memory_bandwidth": 2e11}),
    ),
    "a heavy head, tight": Case(
        ("model.layers=14", "model.vocabulary=80000", "batch.global_size=64"),
        {**NO_CONTEXT, "tensor": 1, "zero_group": None, "sequence_parallel": False},
        {**KEPT, "optimizer": "device"},
        rank_bytes=0.7e9,
        ranks=16,
        machine=SELENE.model_copy(update={"memory_bandwidth": 2e11}),
    ),
    "nodes of six": Case(
        ("model.vocabulary=50000", "batch.global_size=36", "batch.micro_size=1"),
        {**NO_CONTEXT, "zero": 1, "zero_group": None, "sequence_parallel": False},
        {"activations": "keep", "optimizer": "device"},
        rank_bytes=0.4e9,
        ranks=36,
        machine=machine_of(6),
    ),
}


def key_of(deck: Deck) -> tuple[object, ...]:
    """What a layout is."""
    return deck.layout, deck.memory, deck.batch


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_the_best_are_those_of_brute_force(name: str) -> None:
    case = CASES[name]
    deck, ranks, machine = case.deck, case.ranks, case.machine
    budget = bare(deck, ranks)
    found = search(deck, ranks, machine, budget)
    expected = Brute(deck, ranks, machine).best(budget, 10)
    assert len(expected) >= 10
    assert [each.seconds for each in found.best] == pytest.approx(
        [each[0] for each in expected[:10]], rel=1e-9
    )
    known = [key_of(each) for _, each in expected]
    assert all(key_of(each.deck) in known for each in found.best)


def test_with_those_that_hold_less_the_best_are_those_of_brute_force() -> None:
    keys = ("model.layers=14", "batch.global_size=32", "batch.micro_size=1")
    given = {**NO_CONTEXT, "tensor": 1, "zero": 1, "zero_group": None, "sequence_parallel": False}
    case = Case(keys, {**given, "pipeline": 8}, {**KEPT, "optimizer": "device"}, ranks=16)
    budget = bare(case.deck, case.ranks)
    found = search(case.deck, case.ranks, case.machine, budget, 99, schedules=EVERY).best
    expected = Brute(case.deck, case.ranks, case.machine, EVERY).best(budget, 99)
    assert {"v-half", "v-min"} <= {each.deck.layout.schedule for each in found}
    assert [each.seconds for each in found] == pytest.approx([each[0] for each in expected], rel=1e-9)


def found_by(case: Case, best: int = 10) -> SearchResult:
    return search(case.deck, case.ranks, case.machine, bare(case.deck, case.ranks), best)


OPEN = ("model.layers=8", "batch.global_size=32", "model.vocabulary=50000")


def down(tree: LayoutTree, node: Node, random: Random) -> list[Node]:
    """The nodes of a way from one that is open to a layout; shorter where nothing is below."""
    way = [node]
    while not isinstance(way[-1], LayoutNode):
        below = list(tree.children(way[-1]))
        if not below:
            break
        way.append(random.choice(below))
    return way


@pytest.mark.parametrize("name", ["dense", "mixture", "tight", "nodes of six"])
def test_no_layout_undercuts_the_nodes_above_it(name: str) -> None:
    case, random = CASES[name], Random(name)
    deck = case.deck
    tree, budget = tree_of(deck, case.ranks, case.machine, 1e15), bare(deck, case.ranks)
    together, roots, seen = budget.ranks_on_node(deck), list(tree.roots()), 0
    for root in random.choices(roots, k=25):
        *above, last = down(tree, root, random)
        if not isinstance(last, LayoutNode):
            continue
        seen += 1
        seconds = plan_step(last.deck, case.ranks, budget.vocabulary, case.machine).seconds
        assert sum(tree.seconds(last).values()) == pytest.approx(seconds)
        needed = budget.plan(last.deck).max_node_bytes(together) / together
        for node in (*above, last):
            assert node.bound <= seconds * (1 + 1e-12), (node, last.deck.layout)
            assert node.least <= needed, (node, last.deck.layout)
    assert seen > 5


GIVEN: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "schedule": ({"schedule": "zb-h1", "pipeline": 4}, {}),
    "searched for": ({"schedule": "zb-v", "chunks": 2, "pipeline": 4}, {}),
    "chunks": ({"chunks": 2, "pipeline": 4}, {}),
    "a split": ({"split": (3, 5), "pipeline": 2, "chunks": 1}, {}),
    "data": ({"data": 4}, {}),
    "kept gathered": ({}, {"keep_gathered": 1}),
    "sliced": ({}, {"accumulate": "sliced"}),
    "a group": ({"zero": 3, "zero_group": 4}, {}),
    "axes": ({"tensor": 4, "context": 2, "pipeline": 2}, {"recompute": "full"}),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_deck_gives_stays_and_what_is_found_is_what_its_deck_is_planned_to_be(name: str) -> None:
    layout, memory = GIVEN[name]
    case = Case(OPEN, {**NO_CONTEXT, **layout}, {**KEPT, **memory})
    budget = bare(case.deck, case.ranks)
    found = found_by(case, 2).best
    assert found
    for each in found:
        assert {key: getattr(each.deck.layout, key) for key in layout} == layout
        assert {key: getattr(each.deck.memory, key) for key in memory} == memory
        assert not {f"layout.{key}" for key in layout} & set(each.changes)
        step = plan_step(each.deck, case.ranks, budget.vocabulary, case.machine)
        assert each.seconds == pytest.approx(step.seconds)
        assert each.seconds_by_cause == pytest.approx(step.seconds_by_cause)
        plan = budget.plan(each.deck)
        assert each.memory_bytes == plan.largest.memory.total
        assert each.node_bytes == plan.max_node_bytes(case.machine.ranks_per_node)
        assert each.row()["changes"] == {key: each.deck.value(key) for key in each.changes}
    assert found[0].seconds <= found[1].seconds


def test_a_schedule_of_a_file_is_for_its_stages_and_micro_batches(tmp_path: Path) -> None:
    path = tmp_path / "ours.txt"
    path.write_text(str(generate_schedule("1f1b", 4, 8)))
    layout = {"schedule": str(path), "tensor": 4, "context": 1, "chunks": 1}
    case = Case((*OPEN, "batch.micro_size=1"), layout, {"recompute": "full"})
    staged = [each.deck.layout.pipeline for each in found_by(case, 99).best if each.deck.layout.pipeline > 1]
    assert set(staged) == {4}
    wrong = found_by(replace(case, layout=layout | {"pipeline": 8}))
    assert not wrong.best
    assert f"{path}: has 4 stages, expected layout.pipeline = 8" in wrong.rejected.reasons["layout.schedule"]


@pytest.mark.parametrize("chunks", [{}, {"chunks": 2}])
def test_a_schedule_of_a_file_with_two_chunks_is_for_several_stages(
    chunks: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "ours.txt"
    path.write_text(str(generate_schedule("zb-v", 4, 8)))
    layout = {"schedule": str(path), "tensor": 4, "context": 1, **chunks}
    found = found_by(Case((*OPEN, "batch.micro_size=1"), layout, {"recompute": "full"}), 99)
    assert {(each.deck.layout.pipeline, each.deck.layout.chunks) for each in found.best} == {(4, 2)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "chunks"), [("zb-v", 2), ("dualpipe-v", 2), ("interleaved", 3)])
def test_with_a_schedule_of_a_file_the_best_are_those_of_brute_force(
    name: str, chunks: int, tmp_path: Path
) -> None:
    """Of a model whose ends are heavy: where its parts lie shows."""
    path = tmp_path / "ours.txt"
    path.write_text(str(generate_schedule(name, 2, 4, chunks)))
    given = {"schedule": str(path), "pipeline": 2, "chunks": chunks, "sequence_parallel": False}
    keys = ("model.layers=8", "batch.global_size=16", "model.vocabulary=50000")
    case = Case(keys, given, {**KEPT, "optimizer": "device"}, ranks=8)
    budget = bare(case.deck, case.ranks)
    expected = Brute(case.deck, case.ranks, case.machine).best(budget, 99)
    found = found_by(case, 99).best
    assert len(expected) > 3
    assert [each.seconds for each in found] == pytest.approx([each[0] for each in expected], rel=1e-9)


def test_where_nothing_fits_the_quickest_is_told_with_what_lacks() -> None:
    vocabulary = CASES["vocabulary"]
    case = replace(vocabulary, layout={**vocabulary.layout, "tensor": 2, "schedule": "1f1b"}, rank_bytes=1e7)
    assert not found_by(case).best
    budget = bare(case.deck, case.ranks)
    known = layouts(tree_of(case.deck, case.ranks, case.machine, 1e15))
    needs = [budget.plan(each.deck).max_node_bytes(8) / 8 for each in known]
    case = replace(case, rank_bytes=0.97 * min(needs))
    found = found_by(case)
    assert found.rejected.counts["memory"] + found.rejected.counts["memory plan"] > 0
    assert not found.best
    assert found.missed is None or not found.missed.demand.fits
    assert found_by(replace(case, rank_bytes=1.001 * min(needs))).best
    least = least_memory_layout(case.deck, case.ranks, case.machine, budget)
    assert least is not None and least.demand.needed == 8 * min(needs)
    assert some_layout_fits(
        replace(case, rank_bytes=1.001 * min(needs)).deck, case.ranks, case.machine, budget
    )
    assert not some_layout_fits(case.deck, case.ranks, case.machine, budget)


class Picky(Bare):
    """On whose nodes only layouts with some values fit, whatever they need at the least."""

    def plan_split(self, deck: Deck, schedule: Schedule, split: Sequence[int]) -> MemoryPlan:
        return self.any_plan

    def demand(self, deck: Deck, memory: MemoryPlan) -> MemoryDemand:
        fits = (deck.batch.micro_size, deck.memory.recompute, deck.layout.zero) == (1, "full", 2)
        return MemoryDemand("a node", 8, 1 if fits else 3, MemoryLimit("node", 2, "of memory"))

    @cached_property
    def any_plan(self) -> MemoryPlan:
        return self.plan(parse_deck(DECK, ["batch.global_size=64"]))


def test_a_search_goes_on_however_many_do_not_fit_by_their_plan() -> None:
    given = {**NO_CONTEXT, "chunks": 1, "split": None}
    case = Case((*OPEN, "batch.global_size=128"), given, {"activations": "keep"})
    budget = Picky(case.ranks, 50_000)
    found = search(case.deck, case.ranks, case.machine, budget, 5)
    assert found.rejected.counts["memory plan"] > 300
    tree = LayoutTree(SearchSpace(case.deck, case.ranks), case.machine, budget, 1e15)
    fitting = [
        each
        for each in layouts(tree)
        if (demand := budget.demand(each.deck, budget.any_plan)) and demand.fits
    ]
    seconds = sorted(sum(tree.seconds(each).values()) for each in fitting)
    assert [each.seconds for each in found.best] == pytest.approx(seconds[:5])


def test_what_needs_least_is_found_though_others_need_less_by_their_bounds() -> None:
    given = {**NO_CONTEXT, "tensor": 8, "pipeline": 2, "schedule": "1f1b", "sequence_parallel": False}
    case = Case(OPEN, given, {"activations": "keep", "optimizer": "device"})
    least = least_memory_layout(case.deck, case.ranks, case.machine, Picky(case.ranks, 50_000))
    assert least is not None and least.demand.fits


def test_ranks_that_nothing_divides() -> None:
    prime = found_by(Case((*OPEN, "batch.micro_size=1"), {"pipeline": 1}, KEPT, ranks=61))
    assert not prime.best
    assert {"layout.tensor", "batch.global_size"} & set(prime.rejected.impossible)
    assert prime.missed is None
    staged = found_by(Case((*OPEN, "model.layers=64", "batch.micro_size=1"), {}, KEPT, ranks=61), 1)
    assert [each.deck.layout.pipeline for each in staged.best] == [61]


def test_ranks_of_a_node_that_hold_little_leave_room_for_those_that_hold_much() -> None:
    """All stages of a pipeline lie on one node: the tables of both ends, and blocks of as many micro-batches
    as there are stages behind them.
    """
    given = {**NO_CONTEXT, "tensor": 1, "pipeline": 16, "schedule": "1f1b", "chunks": 1, "zero": 0}
    keys = ("model.layers=14", "model.vocabulary=45000", "batch.micro_size=2", "model.tied=false")
    memory = {**KEPT, "optimizer": "device"}
    case = Case(keys, given, memory, ranks=16, machine=machine_of(16))
    budget = bare(case.deck, case.ranks)
    stages = [stage.memory.total for stage in budget.plan(case.deck).stages]
    mean = sum(stages) / len(stages)
    assert stages[0] > stages[1] > 1.2 * mean and stages[-1] > stages[1]
    (only,) = found_by(replace(case, rank_bytes=mean + 1)).best
    assert only.node_bytes == sum(stages)
    assert not found_by(replace(case, rank_bytes=mean - 1)).best


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "experts"), [(6, 3), (12, 3), (10, 5)])
def test_experts_of_which_the_other_axes_divide_nothing(ranks: int, experts: int) -> None:
    keys = (*MIXTURE, f"model.experts.count={experts}", "batch.global_size=60", "batch.micro_size=1")
    found = found_by(Case(keys, {"pipeline": 1}, KEPT, ranks=ranks), 99)
    assert {each.deck.layout.expert for each in found.best} == {1, experts}
