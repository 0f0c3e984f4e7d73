"""What the ranks of nodes need at the least, against what each kind of node has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hpctrain.deck.schema import Deck
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.search.in_flight import Opened
from hpctrain.plan.search.least_bytes import StateBytes, ZeroSplit
from hpctrain.plan.search.model_partition import Form, ParameterCounts
from hpctrain.plan.search.search_space import Values
from hpctrain.plan.time.layout_sizes import LayoutSizes

States = Callable[[ParameterCounts, Opened], float]
"""Bytes of states of elements, where so many whole gradients are there at once."""


_ROUNDED = 1 - 1e-12
"""What is exactly as much as a plan says is not to be more by the order of its sums."""


class StageNeeds(NamedTuple):
    """A stage that stands for those that hold as much: its number, which of a form's is like it, the kinds of
    its parts by chunk, and the share of the largest memory that it has.
    """

    number: int
    like: int
    kinds: Sequence[int]
    share: float


class Needs:
    """Of a deck on so many ranks, of which `per_node` of a group may be neighbours. Where kinds of node have
    less memory than the largest, what is needed is told in bytes of that one: a rank that may have half as
    much needs twice what it holds.
    """

    def __init__(self, deck: Deck, budget: MemoryBudget, per_node: int) -> None:
        self._ranks, self._per_node = budget.ranks, per_node
        self.libraries, self._together = budget.process_bytes(deck), budget.ranks_within_limit(deck)
        of_kinds = budget.mean_rank_bytes_by_kind(deck)
        self._limit, self._shared = max(size for size, _ in of_kinds), budget.shared_bytes(deck)
        self._shares = [(size / self._limit if len(of_kinds) > 1 else 1.0, ranks) for size, ranks in of_kinds]
        full = (share * -(-ranks // self._together) for share, ranks in self._shares)
        self._mean = sum(full) * self._together / self._ranks
        device = StateBytes.of(deck)
        self._states = {True: device, False: device.without_optimizer()}
        self._of_stages: dict[int, list[float]] = {}
        self._nodes: dict[int, list[tuple[Counter[int], float]]] = {}

    def states_of(self, at: LayoutSizes, zero: Values) -> States:
        """Of the states of a stage's elements under some ZeRO."""
        stage, group = zero["layout.zero"], zero["layout.zero_group"]
        kept = self._states[zero["memory.optimizer"] == "device"]
        assert isinstance(stage, int)
        size, of_experts = at.data_ranks.size, at.expert_data_ranks.size
        if isinstance(group, int):
            size, of_experts = group, min(group, of_experts)

        def states(elements: ParameterCounts, opened: Opened) -> float:
            split = ZeroSplit(stage, size, of_experts, "none" if at.sliced else opened)
            return kept.rank_bytes(elements, split, self._per_node)

        return states

    def planned(self, demand: MemoryDemand) -> float:
        """As `most`, of a plan."""
        shared = self._shared * (self._together - 1)
        return (demand.needed + shared) / (demand.limit.bytes + shared) * self._limit

    def of_mean_rank(self, held: float) -> float:
        """Where a rank holds so much in the mean over all, beside libraries."""
        return (self.libraries + held) / self._mean * _ROUNDED

    def mixes(self, at: LayoutSizes) -> bool:
        """Whether ranks that share memory are of several stages."""
        return bool(at.stage_ranks % self._together)

    def shares(self, at: LayoutSizes) -> list[float]:
        """Of the largest memory, that which each stage's ranks have."""
        if at.pipeline not in self._of_stages:
            self._of_stages[at.pipeline] = [self._share(at, stage) for stage in range(at.pipeline)]
        return self._of_stages[at.pipeline]

    def places(self, at: LayoutSizes, form: Form) -> list[StageNeeds]:
        """The stages of a form that are looked at: all, where a node's ranks are of several."""
        key = "places", at.stage_ranks
        if key not in form.memo:
            form.memo[key] = sorted(self._places(at, form))
        found: list[StageNeeds] = form.memo[key]
        return found

    def _places(self, at: LayoutSizes, form: Form) -> Iterator[StageNeeds]:
        for like, stage in enumerate(form.stages):
            shares = {number: self._share(at, number) for number in stage.numbers}
            first = {share: number for number, share in reversed(shares.items())}
            for number in shares if self.mixes(at) else first.values():
                yield StageNeeds(number, like, form.kinds_on(number), shares[number])

    def most(self, at: LayoutSizes, places: Sequence[StageNeeds], held: Sequence[float]) -> float:
        """Of the node that needs most of what it has, for a rank, where stages hold so much."""
        if not self.mixes(at):
            each = ((self.libraries + own) / place.share for place, own in zip(places, held, strict=True))
            return max(each) * _ROUNDED
        needed = (
            sum(many * (self.libraries + held[stage]) for stage, many in node.items()) / share
            for node, share in self._several(at)
        )
        return max(needed) / self._together * _ROUNDED

    def _share(self, at: LayoutSizes, stage: int) -> float:
        """Of the kind of node under a stage that has least."""
        if len(self._shares) == 1:
            return 1.0
        first, last, begin, found = stage * at.stage_ranks, (stage + 1) * at.stage_ranks, 0, 1.0
        for share, ranks in self._shares:
            if begin < last and first < begin + ranks:
                found = min(found, share)
            begin += ranks
        return found

    def _several(self, at: LayoutSizes) -> list[tuple[Counter[int], float]]:
        """Of each node how many ranks are of which stage, and its share; nodes that are alike once."""
        if at.pipeline not in self._nodes:
            found: dict[object, tuple[Counter[int], float]] = {}
            shares = [share for share, ranks in self._shares for _ in range(ranks)]
            for first in range(0, self._ranks, self._together):
                last = min(first + self._together, self._ranks)
                node = Counter(rank // at.stage_ranks for rank in range(first, last))
                found[frozenset(node.items()), shares[first]] = node, shares[first]
            self._nodes[at.pipeline] = list(found.values())
        return self._nodes[at.pipeline]
