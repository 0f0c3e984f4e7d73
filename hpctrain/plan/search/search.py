"""The quickest layouts that fit, in their order: exact by the plan's own seconds and bytes.

Best first (Hart, Nilsson and Raphael 1968): of all nodes of the tree that are open, the one whose bound is
least is looked into. A layout that comes up with its own seconds is quicker than all that was not looked at;
whether it fits is then asked of the plan of its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from operator import itemgetter

from hpctrain.deck.check import check_deck
from hpctrain.deck.schema import Deck
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.search.candidate import Candidate
from hpctrain.plan.search.layout_tree import Tree
from hpctrain.plan.search.partition_choices import LEAST_GAIN
from hpctrain.plan.search.search_space import EVERY, TRIED, SearchSpace
from hpctrain.plan.search.tree_nodes import Fell, LayoutNode, Node
from hpctrain.plan.time.machine_rates import MachineRates

BEST = 10
"""Layouts that are told."""

Progress = Callable[[int], None]
"""Told of every node that is looked into, with how many there were."""


@dataclass(frozen=True)
class Missed:
    """A layout that does not fit, and what a node lacks."""

    candidate: Candidate
    demand: MemoryDemand


@dataclass(frozen=True)
class SearchResult:
    """The best layouts, the quickest first, what became of others, how many nodes of the tree were left open,
    the quickest layout that does not fit, if one came up, and the schedules that were not tried.
    """

    best: tuple[Candidate, ...]
    fell: Fell
    slower: int
    missed: Missed | None
    untried: tuple[str, ...] = ()


def search(
    deck: Deck,
    ranks: int,
    machine: MachineRates,
    budget: MemoryBudget,
    best: int = BEST,
    progress: Progress | None = None,
    schedules: Sequence[str] = TRIED,
) -> SearchResult:
    """The layouts of a deck on so many ranks of a machine, `best` of them, or all that fit; by one of these
    schedules where the deck gives none.

    One that fits has its blocks split as a run does by itself, or by seconds, where that is so much quicker
    and fits too; on several kinds of node all layouts are split by seconds.
    """
    choices = SearchSpace(deck, ranks, schedules)
    tree = Tree(choices, machine, budget, budget.mean_rank_bytes(deck))
    queue = _Queue(tree.roots(), lambda node: node.bound)
    found: list[Candidate] = []
    split_otherwise = set[object]()
    missed: Missed | None = None
    for looked, node in enumerate(queue):
        if progress is not None:
            progress(looked)
        if not isinstance(node, LayoutNode):
            queue.add(tree.children(node))
        elif node.causes is None:
            if not tree.fell.cannot_be(check_deck(node.deck, ranks), node.deck):
                queue.add([_timed(tree, node)])
        elif node.deck not in split_otherwise and _is_worth_it(tree, node):
            candidate, demand = _planned(tree, node)
            if _fits(demand):
                found.append(candidate)
                if node.usual is not None:
                    split_otherwise.add(node.usual.deck)
            else:
                tree.fell.counts["memory plan"] += 1
                assert demand is not None
                missed = missed or Missed(candidate, demand)
        if len(found) == best:
            break
    left = () if choices.given("layout.schedule") else [each for each in EVERY if each not in schedules]
    return SearchResult(tuple(found), tree.fell, len(queue), missed, tuple(left))


def _timed(tree: Tree, node: LayoutNode) -> LayoutNode:
    """A layout with its own seconds."""
    causes = tree.seconds(node)
    return replace(node, bound=sum(causes.values()), causes=causes)


def _is_worth_it(tree: Tree, node: LayoutNode) -> bool:
    """Whether one that is not split as usual is that much quicker than the one that is, which fits."""
    if node.usual is None:
        return True
    usual = _timed(tree, node.usual)
    return node.bound <= (1 - LEAST_GAIN) * usual.bound and _fits(_planned(tree, usual)[1])


def _fits(demand: MemoryDemand | None) -> bool:
    return demand is None or demand.leaves_reserve


def least_memory_layout(deck: Deck, ranks: int, machine: MachineRates, budget: MemoryBudget) -> Missed | None:
    """Of a deck's layouts the one whose nodes need least of what they have; None where there is none, or it
    is not known what a node has.
    """
    tree, found = Tree(SearchSpace(deck, ranks, EVERY), machine, budget, inf), list[tuple[float, Missed]]()
    for node in _roomy(tree):
        if found and node.least >= found[0][0]:
            break  # nor does any that has not come up need less
        candidate, demand = _planned(tree, node)
        if demand is None:
            return None
        each = tree.needs.planned(demand), Missed(candidate, demand)
        found = [min([*found, each], key=itemgetter(0))]
    return found[0][1] if found else None


def some_layout_fits(deck: Deck, ranks: int, machine: MachineRates, budget: MemoryBudget) -> bool:
    """Whether any of a deck's layouts fits."""
    tree = Tree(SearchSpace(deck, ranks, EVERY), machine, budget, budget.mean_rank_bytes(deck))
    return any(_fits(_planned(tree, node)[1]) for node in _roomy(tree))


def _roomy(tree: Tree) -> Iterator[LayoutNode]:
    """Layouts in the order of what they need at the least."""
    queue = _Queue(tree.roots(), lambda node: node.least)
    for node in queue:
        if not isinstance(node, LayoutNode):
            queue.add(tree.children(node))
        elif not tree.fell.cannot_be(check_deck(node.deck, tree.choices.ranks), node.deck):
            yield _timed(tree, node)


class _Queue:
    """Open nodes, the least first; those that are alike in the order in which they came."""

    def __init__(self, nodes: Iterable[Node], size: Callable[[Node], float]) -> None:
        self._size, self._order = size, count()
        self._nodes = [(size(node), next(self._order), node) for node in nodes]
        heapify(self._nodes)

    def add(self, nodes: Iterable[Node]) -> None:
        """Others, which are also open."""
        for node in nodes:
            heappush(self._nodes, (self._size(node), next(self._order), node))

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        while self._nodes:
            yield heappop(self._nodes)[-1]


def _planned(tree: Tree, node: LayoutNode) -> tuple[Candidate, MemoryDemand | None]:
    """What a layout takes and holds."""
    assert node.causes is not None
    memory = tree.memory(node)
    demand = tree.budget.demand(node.deck, memory)
    values = {key: node.deck.value(key) for key in tree.choices.free}
    needed = memory.max_node_bytes(tree.choices.ranks) if demand is None else demand.needed
    return Candidate(node.deck, values, node.causes, memory.largest.memory.total, needed), demand
