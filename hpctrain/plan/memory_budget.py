"""Comparison of the planned memory of decks with the memory of the nodes that the ranks will have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.kernel_choice import with_cached_kernels
from hpctrain.host.device import device_kind, on_host
from hpctrain.host.memory import MemoryLimit, shared_resident_bytes
from hpctrain.pipeline.action import Schedule
from hpctrain.plan.auxiliary_memory import plan_run_memory
from hpctrain.plan.gpu_overhead import SEARCH_RESERVE
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory_demand import MemoryDemand, process_limits
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.server_plan import plan_served


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of the nodes that a number of ranks will have, with which planned decks are compared.

    Attributes:
        ranks: Number of ranks.
        vocabulary: Number of tokens of the model.
        ranks_per_node: Number of ranks of a node; None for that of the deck, or else all ranks.
        node_kinds: Name, number of nodes, and bytes for each rank of each kind of node, in the order in which
            ranks fill the nodes; () if all nodes are alike.
        measured_process_bytes: Memory of a process without a model, if it was measured earlier; None to
            measure it at the first use. Planning increases the memory of this process.
    """

    ranks: int
    vocabulary: int
    ranks_per_node: int | None = None
    node_kinds: tuple[tuple[str, int, float], ...] = ()
    measured_process_bytes: int | None = None

    @cached_property
    def _shared_bytes(self) -> int:
        return shared_resident_bytes()

    @cached_property
    def _process_bytes(self) -> int:
        return library_bytes() if self.measured_process_bytes is None else self.measured_process_bytes

    def process_bytes(self, deck: Deck) -> int:
        """Return the memory of a process without a model; 0 on GPUs. Call it before plans are made."""
        return self._process_bytes if on_host(device_kind(deck.run.device)) else 0

    def shared_bytes(self, deck: Deck) -> int:
        """Return the part of `process_bytes` that all ranks of a node have in common."""
        return self._shared_bytes if on_host(device_kind(deck.run.device)) else 0

    def ranks_on_node(self, deck: Deck) -> int:
        """Return the number of ranks that share the memory of a node; emulated nodes count as one."""
        return min(self.ranks, self.ranks_per_node or deck.machine.known_ranks_per_node or self.ranks)

    def with_kernels(self, deck: Deck) -> Deck:
        """Return a deck with the vocabulary, and with the kernels that were measured as fastest here."""
        return with_cached_kernels(deck.with_keys(model={"vocabulary": self.vocabulary}), self.ranks)

    def plan(self, deck: Deck) -> MemoryPlan:
        """Return the planned memory of all ranks.

        Raises:
            HpctrainError: A run would refuse the deck.
        """
        plan = plan_run_memory if deck.communication.server is None else plan_served
        return plan(
            self.with_kernels(deck),
            self.ranks,
            self.vocabulary,
            self.process_bytes(deck),
            self._per_node(deck),
        )

    def plan_split(self, deck: Deck, schedule: Schedule, split: Sequence[int]) -> MemoryPlan:
        """Return the planned memory with a given schedule and number of blocks of each pipeline part."""
        known, process_bytes = self.with_kernels(deck), self.process_bytes(deck)
        return plan_run_memory(
            known, self.ranks, self.vocabulary, process_bytes, self._per_node(deck), split, schedule
        )

    def _per_node(self, deck: Deck) -> int | None:
        return self.ranks_per_node or deck.communication.ranks_per_node or deck.machine.ranks_per_node

    def limit(self, deck: Deck) -> tuple[MemoryLimit, int] | None:
        """Return the lowest limit and how many ranks share it: all of a node, or all of a GPU.

        The limit is that of the deck, or else that of this machine. The result is None if neither is known.
        """
        machine, device = deck.machine, device_kind(deck.run.device)
        sharing_ranks = self.ranks_on_node(deck)
        if not on_host(device):
            sharing_ranks = -(-sharing_ranks // (machine.gpus_per_node or sharing_ranks))
        limits = process_limits(machine, device, os.environ)
        return (min(limits, key=lambda limit: limit.bytes), sharing_ranks) if limits else None

    def ranks_within_limit(self, deck: Deck) -> int:
        """Return the number of ranks that share a limit: those of a node, or of a GPU."""
        limit = self.limit(deck)
        return self.ranks_on_node(deck) if limit is None else limit[1]

    def mean_rank_bytes(self, deck: Deck) -> float:
        """Return the mean number of bytes that a rank may use; inf if no limit is known.

        The bytes that all ranks of a node have in common count for each of them. If there are several kinds
        of node, the result is that of the kind with the largest mean.
        """
        return max(size for size, _ in self.mean_rank_bytes_by_kind(deck))

    def mean_rank_bytes_by_kind(self, deck: Deck) -> list[tuple[float, int]]:
        """Return the mean bytes of a rank, and the number of ranks, for each kind of node that has ranks."""
        limit = self.limit(deck)
        if limit is None:
            return [(inf, self.ranks)]
        (most, sharing_ranks), shared = (limit[0].bytes, limit[1]), self.shared_bytes(deck) * (limit[1] - 1)
        if not self.node_kinds:
            return [((most + shared) / sharing_ranks, self.ranks)]
        sizes, left = [], self.ranks
        for number, (_, nodes, rank_bytes) in enumerate(self.node_kinds, 1):
            ranks = left if number == len(self.node_kinds) else min(left, nodes * self.ranks_on_node(deck))
            node_bytes = min(most, int(rank_bytes * sharing_ranks))
            sizes.append(((node_bytes + shared) / sharing_ranks, ranks))
            left -= ranks
        return [each for each in sizes if each[1]]

    def demand(self, deck: Deck, memory: MemoryPlan) -> MemoryDemand | None:
        """Return the largest planned demand of ranks that share a limit; None if no limit is known."""
        limit = self.limit(deck)
        if limit is None:
            return None
        on_cpu = on_host(device_kind(deck.run.device))
        deck_limit = deck.machine.memory if on_cpu else deck.machine.gpu_memory
        host = "this machine" if deck_limit is None else "a node"
        (most, sharing_ranks), shared = limit, self.shared_bytes(deck)
        reserve = 0.0 if on_cpu else SEARCH_RESERVE
        if not self.node_kinds:
            needed = memory.max_node_bytes(sharing_ranks, shared)
            return MemoryDemand(host, sharing_ranks, needed, most, reserve)
        demands = []
        for number, needed in enumerate(memory.bytes_by_node(sharing_ranks, shared)):
            name, rank_bytes = self._kind_of(number * sharing_ranks // self.ranks_on_node(deck))
            own = MemoryLimit(most.pool, min(most.bytes, int(rank_bytes * sharing_ranks)), "of memory")
            demands.append(MemoryDemand(f"a node of {name}", sharing_ranks, needed, own, reserve))
        return max(demands, key=lambda demand: demand.needed / demand.limit.bytes)

    def _kind_of(self, node: int) -> tuple[str, float]:
        """Return the name of a node's kind and its bytes for each rank; the last kind's beyond all nodes."""
        ends = accumulate(nodes for _, nodes, _ in self.node_kinds)
        number = sum(end <= node for end in ends)
        name, _, rank_bytes = self.node_kinds[min(number, len(self.node_kinds) - 1)]
        return name, rank_bytes
