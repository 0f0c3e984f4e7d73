"""Lower bounds of the memory of ranks, compared with the memory of each kind of node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hpctrain.deck.schema import Deck
from hpctrain.plan.memory_budget import MemoryBudget
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.search.in_flight import CompleteGradients
from hpctrain.plan.search.least_bytes import StateBytes, ZeroSplit
from hpctrain.plan.search.model_partition import ModelPartition, ParameterCounts
from hpctrain.plan.search.search_space import Values
from hpctrain.plan.time.layout_sizes import LayoutSizes

States = Callable[[ParameterCounts, CompleteGradients], float]
"""Function that returns the bytes of parameters and their state on a rank."""


_ROUNDED = 1 - 1e-12
"""Factor that keeps lower bounds below the planned bytes, whatever the order of sums."""


class StageNeeds(NamedTuple):
    """Stage that stands for all stages with the same memory.

    Attributes:
        number: Number of the stage.
        stage_index: Index of its layers in `ModelPartition.stages`.
        kinds: Kinds of its parts, by chunk.
        share: Memory of its ranks, as a share of the largest memory of a rank.
    """

    number: int
    stage_index: int
    kinds: Sequence[int]
    share: float


class NodeNeeds:
    """Lower bounds of the memory that ranks of a deck need.

    If some kinds of node have less memory than others, needs are scaled to the largest: a rank that has half
    of the largest memory counts with twice its bytes.

    Args:
        deck: The deck.
        budget: Memory of the nodes.
        per_node: Largest number of ranks of a group that share a node.

    Attributes:
        process_bytes: Bytes of a process without a model.
    """

    def __init__(self, deck: Deck, budget: MemoryBudget, per_node: int) -> None:
        self._ranks, self._per_node = budget.ranks, per_node
        self.process_bytes, self._sharing_ranks = budget.process_bytes(deck), budget.ranks_within_limit(deck)
        kind_bytes = budget.mean_rank_bytes_by_kind(deck)
        self._limit, self._shared = max(size for size, _ in kind_bytes), budget.shared_bytes(deck)
        self._shares = [
            (size / self._limit if len(kind_bytes) > 1 else 1.0, ranks) for size, ranks in kind_bytes
        ]
        full = (share * -(-ranks // self._sharing_ranks) for share, ranks in self._shares)
        self._mean = sum(full) * self._sharing_ranks / self._ranks
        device = StateBytes.of(deck)
        self._states = {True: device, False: device.without_optimizer()}
        self._of_stages: dict[int, list[float]] = {}
        self._nodes: dict[int, list[tuple[Counter[int], float]]] = {}

    def state_function(self, at: LayoutSizes, zero: Values) -> States:
        """Return the function for the bytes of parameters and their state with a choice of ZeRO."""
        stage, group = zero["layout.zero"], zero["layout.zero_group"]
        state_bytes = self._states[zero["memory.optimizer"] == "device"]
        assert isinstance(stage, int)
        size, expert_group_size = at.data_ranks.size, at.expert_data_ranks.size
        if isinstance(group, int):
            size, expert_group_size = group, min(group, expert_group_size)

        def states(elements: ParameterCounts, complete_gradients: CompleteGradients) -> float:
            split = ZeroSplit(stage, size, expert_group_size, "none" if at.sliced else complete_gradients)
            return state_bytes.rank_bytes(elements, split, self._per_node)

        return states

    def planned(self, demand: MemoryDemand) -> float:
        """Return the planned bytes of the node that needs most, in the unit of `largest`."""
        shared = self._shared * (self._sharing_ranks - 1)
        return (demand.needed + shared) / (demand.limit.bytes + shared) * self._limit

    def of_mean_rank(self, mean_bytes: float) -> float:
        """Return the bytes of a rank if ranks need `mean_bytes` on average without libraries."""
        return (self.process_bytes + mean_bytes) / self._mean * _ROUNDED

    def nodes_mix_stages(self, at: LayoutSizes) -> bool:
        """Return True if ranks of several stages share memory."""
        return bool(at.stage_ranks % self._sharing_ranks)

    def shares(self, at: LayoutSizes) -> list[float]:
        """Return the memory of a rank of each stage, as a share of the largest memory."""
        if at.pipeline not in self._of_stages:
            self._of_stages[at.pipeline] = [self._share(at, stage) for stage in range(at.pipeline)]
        return self._of_stages[at.pipeline]

    def stages(self, at: LayoutSizes, partition: ModelPartition) -> list[StageNeeds]:
        """Return the stages whose memory must be computed: all of them if nodes mix stages."""
        key = "stages", at.stage_ranks
        if key not in partition.memo:
            partition.memo[key] = sorted(self._stages(at, partition))
        stage_needs: list[StageNeeds] = partition.memo[key]
        return stage_needs

    def _stages(self, at: LayoutSizes, partition: ModelPartition) -> Iterator[StageNeeds]:
        for index, stage in enumerate(partition.stages):
            shares = {number: self._share(at, number) for number in stage.numbers}
            first = {share: number for number, share in reversed(shares.items())}
            for number in shares if self.nodes_mix_stages(at) else first.values():
                yield StageNeeds(number, index, partition.kinds_on(number), shares[number])

    def largest(self, at: LayoutSizes, stages: Sequence[StageNeeds], stage_bytes: Sequence[float]) -> float:
        """Return the bytes of a rank on the node that needs most.

        Args:
            at: Sizes of the layout.
            stages: Stages whose memory is computed, as `stages` returns them.
            stage_bytes: Bytes of a rank of each stage, without libraries.
        """
        if not self.nodes_mix_stages(at):
            both = zip(stages, stage_bytes, strict=True)
            return max((self.process_bytes + size) / stage.share for stage, size in both) * _ROUNDED
        needed = (
            sum(ranks * (self.process_bytes + stage_bytes[stage]) for stage, ranks in node.items()) / share
            for node, share in self._mixed_nodes(at)
        )
        return max(needed) / self._sharing_ranks * _ROUNDED

    def _share(self, at: LayoutSizes, stage: int) -> float:
        """Return the least memory of the ranks of a stage, as a share of the largest."""
        if len(self._shares) == 1:
            return 1.0
        first, last, begin, least = stage * at.stage_ranks, (stage + 1) * at.stage_ranks, 0, 1.0
        for share, ranks in self._shares:
            if begin < last and first < begin + ranks:
                least = min(least, share)
            begin += ranks
        return least

    def _mixed_nodes(self, at: LayoutSizes) -> list[tuple[Counter[int], float]]:
        """Return the number of ranks of each stage on each node, and the node's share of the largest memory.

        Equal nodes are listed once.
        """
        if at.pipeline not in self._nodes:
            nodes: dict[object, tuple[Counter[int], float]] = {}
            shares = [share for share, ranks in self._shares for _ in range(ranks)]
            for first in range(0, self._ranks, self._sharing_ranks):
                last = min(first + self._sharing_ranks, self._ranks)
                node = Counter(rank // at.stage_ranks for rank in range(first, last))
                nodes[frozenset(node.items()), shares[first]] = node, shares[first]
            self._nodes[at.pipeline] = list(nodes.values())
        return self._nodes[at.pipeline]
