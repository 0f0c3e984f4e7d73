"""Best-first search for the fastest layouts that fit. It is exact by predicted time and memory.

Of all open nodes of the tree, the one with the least lower bound is expanded (Hart, Nilsson and Raphael
1968). If a complete layout has the least bound, it is faster than all that were not visited. Then its memory
is planned.
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
from hpctrain.plan.search.layout_tree import LayoutTree
from hpctrain.plan.search.partition_choices import LEAST_GAIN
from hpctrain.plan.search.search_space import EVERY, TRIED, SearchSpace
from hpctrain.plan.search.tree_nodes import LayoutNode, Node, RejectedLayouts
from hpctrain.plan.time.machine_rates import MachineRates

BEST = 10
"""Number of layouts that are listed."""

Progress = Callable[[int], None]
"""Function that is called with the number of visited nodes."""


@dataclass(frozen=True)
class UnfittingLayout:
    """Layout that does not fit, and the memory that it needs on a node."""

    candidate: Candidate
    demand: MemoryDemand


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: The best layouts, the fastest first.
        rejected: Counts of rejected layouts.
        slower: Number of nodes that were not expanded.
        missed: Fastest layout that does not fit; None if none was visited.
        untried: Schedules that were not searched.
    """

    best: tuple[Candidate, ...]
    rejected: RejectedLayouts
    slower: int
    missed: UnfittingLayout | None
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
    """Return the fastest layouts of a deck that fit.

    Blocks are split by FLOPs, as in a run. They are split by seconds if this is clearly faster and fits, or
    if there are several kinds of node.

    Args:
        deck: The deck.
        ranks: Number of ranks.
        machine: Rates of the machine.
        budget: Memory of the nodes.
        best: Number of layouts.
        progress: Function that is called with the number of visited nodes.
        schedules: Schedules to search if the deck sets none.
    """
    choices = SearchSpace(deck, ranks, schedules)
    tree = LayoutTree(choices, machine, budget, budget.mean_rank_bytes(deck))
    queue = _Queue(tree.roots(), lambda node: node.bound)
    candidates: list[Candidate] = []
    resplit_decks = set[object]()
    missed: UnfittingLayout | None = None
    for visited, node in enumerate(queue):
        if progress is not None:
            progress(visited)
        if not isinstance(node, LayoutNode):
            queue.add(tree.children(node))
        elif node.causes is None:
            if not tree.rejected.reject(check_deck(node.deck, ranks), node.deck):
                queue.add([_timed(tree, node)])
        elif node.deck not in resplit_decks and _is_worth_it(tree, node):
            candidate, demand = _planned(tree, node)
            if _fits(demand):
                candidates.append(candidate)
                if node.by_flops is not None:
                    resplit_decks.add(node.by_flops.deck)
            else:
                tree.rejected.counts["memory plan"] += 1
                assert demand is not None
                missed = missed or UnfittingLayout(candidate, demand)
        if len(candidates) == best:
            break
    untried = () if choices.is_set("layout.schedule") else [each for each in EVERY if each not in schedules]
    return SearchResult(tuple(candidates), tree.rejected, len(queue), missed, tuple(untried))


def _timed(tree: LayoutTree, node: LayoutNode) -> LayoutNode:
    """Return a layout with its predicted seconds."""
    causes = tree.seconds(node)
    return replace(node, bound=sum(causes.values()), causes=causes)


def _is_worth_it(tree: LayoutTree, node: LayoutNode) -> bool:
    """Return True if the layout is split by FLOPs, or clearly faster than with that split, which fits."""
    if node.by_flops is None:
        return True
    by_flops = _timed(tree, node.by_flops)
    return node.bound <= (1 - LEAST_GAIN) * by_flops.bound and _fits(_planned(tree, by_flops)[1])


def _fits(demand: MemoryDemand | None) -> bool:
    return demand is None or demand.leaves_reserve


def least_memory_layout(
    deck: Deck, ranks: int, machine: MachineRates, budget: MemoryBudget
) -> UnfittingLayout | None:
    """Return the layout whose nodes need least memory; None if there is none or the limit is unknown."""
    tree, candidates = (
        LayoutTree(SearchSpace(deck, ranks, EVERY), machine, budget, inf),
        list[tuple[float, UnfittingLayout]](),
    )
    for node in _by_least_memory(tree):
        if candidates and node.least >= candidates[0][0]:
            break  # no remaining layout needs less memory
        candidate, demand = _planned(tree, node)
        if demand is None:
            return None
        each = tree.needs.planned(demand), UnfittingLayout(candidate, demand)
        candidates = [min([*candidates, each], key=itemgetter(0))]
    return candidates[0][1] if candidates else None


def some_layout_fits(deck: Deck, ranks: int, machine: MachineRates, budget: MemoryBudget) -> bool:
    """Return True if any layout of a deck fits."""
    tree = LayoutTree(SearchSpace(deck, ranks, EVERY), machine, budget, budget.mean_rank_bytes(deck))
    return any(_fits(_planned(tree, node)[1]) for node in _by_least_memory(tree))


def _by_least_memory(tree: LayoutTree) -> Iterator[LayoutNode]:
    """Yield the layouts in the order of their lower bounds of memory."""
    queue = _Queue(tree.roots(), lambda node: node.least)
    for node in queue:
        if not isinstance(node, LayoutNode):
            queue.add(tree.children(node))
        elif not tree.rejected.reject(check_deck(node.deck, tree.choices.ranks), node.deck):
            yield _timed(tree, node)


class _Queue:
    """Open nodes, the least first. Equal nodes are in the order in which they were added."""

    def __init__(self, nodes: Iterable[Node], size: Callable[[Node], float]) -> None:
        self._size, self._order = size, count()
        self._nodes = [(size(node), next(self._order), node) for node in nodes]
        heapify(self._nodes)

    def add(self, nodes: Iterable[Node]) -> None:
        """Add open nodes."""
        for node in nodes:
            heappush(self._nodes, (self._size(node), next(self._order), node))

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        while self._nodes:
            yield heappop(self._nodes)[-1]


def _planned(tree: LayoutTree, node: LayoutNode) -> tuple[Candidate, MemoryDemand | None]:
    """Return the predicted time and memory of a layout."""
    assert node.causes is not None
    memory = tree.memory(node)
    demand = tree.budget.demand(node.deck, memory)
    values = {key: node.deck.value(key) for key in tree.choices.free}
    needed = memory.max_node_bytes(tree.choices.ranks) if demand is None else demand.needed
    return Candidate(node.deck, values, node.causes, memory.largest.memory.total, needed), demand
