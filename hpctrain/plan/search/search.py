"""The quickest layouts that fit, in their order: exact by the plan's own seconds and bytes.

Best first (Hart, Nilsson and Raphael 1968): of all nodes of the tree that are open, the one whose bound is
least is looked into. A layout that comes up with its own seconds is quicker than all that was not looked at;
whether it fits is then asked of the plan of its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from hpctrain.deck.check import check_deck
from hpctrain.deck.schema import Deck
from hpctrain.plan.holding import Holding
from hpctrain.plan.memory import MemoryPlan
from hpctrain.plan.room import Room
from hpctrain.plan.search.candidate import Candidate
from hpctrain.plan.search.choices import Choices
from hpctrain.plan.search.tree import Fell, Layout, Node, Tree
from hpctrain.plan.time.machine import Machine

BEST = 10
"""Layouts that are told."""


@dataclass(frozen=True)
class Missed:
    """The quickest layout that does not fit: its seconds, and what a node lacks."""

    candidate: Candidate
    room: Room


@dataclass(frozen=True)
class Found:
    """The best layouts, the quickest first, what became of others, and the open nodes of the tree."""

    best: tuple[Candidate, ...]
    fell: Fell
    slower: int
    missed: Missed | None


def search(
    deck: Deck,
    ranks: int,
    machine: Machine,
    holding: Holding,
    best: int = BEST,
    progress: Callable[[int], None] | None = None,
) -> Found:
    """The layouts of a deck on so many ranks of a machine, `best` of them at most."""
    choices = Choices(deck, ranks)
    tree = Tree(choices, machine, holding, holding.of_mean_rank(deck))
    order = count()
    open_nodes: list[tuple[float, int, Node, dict[str, float] | None]] = [
        (node.bound, next(order), node, None) for node in tree.roots()
    ]
    heapify(open_nodes)
    found: list[Candidate] = []
    missed: Missed | None = None
    while open_nodes and len(found) < best:
        _, number, node, causes = heappop(open_nodes)
        if progress is not None:
            progress(number)
        if not isinstance(node, Layout):
            for child in tree.children(node):
                heappush(open_nodes, (child.bound, next(order), child, None))
        elif causes is None:
            if tree.fell.cannot_be(check_deck(node.deck, ranks), node.deck):
                continue
            own = dict(tree.seconds(node))
            heappush(open_nodes, (sum(own.values()), next(order), node, own))
        else:
            memory = tree.memory(node)
            room = holding.room(node.deck, memory)
            candidate = _candidate(choices, node, causes, memory, room)
            if room is None or room.fits:
                found.append(candidate)
            else:
                tree.fell.counts["memory plan"] += 1
                missed = missed or Missed(candidate, room)
    return Found(tuple(found), tree.fell, len(open_nodes), missed)


def _candidate(
    choices: Choices, node: Layout, causes: dict[str, float], memory: MemoryPlan, room: Room | None
) -> Candidate:
    values = {key: node.deck.value(key) for key in choices.free}
    needed = memory.node_bytes(choices.ranks) if room is None else room.needed
    return Candidate(node.deck, values, causes, memory.largest.memory.total, needed)
