"""What the ranks of a deck hold, against what their nodes have: of one deck after the other."""

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
from hpctrain.plan.companions import plan_run_memory
from hpctrain.plan.gpu_overhead import SEARCH_RESERVE
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory import MemoryPlan
from hpctrain.plan.room import Room, limits_of
from hpctrain.plan.served import plan_served


@dataclass(frozen=True)
class Holding:
    """Of so many ranks, with a vocabulary that is settled. A node has `ranks_per_node`, else those that a
    deck emulates, else those of its [machine], else all. Where nodes are of several `kinds`, these are their
    names, numbers and bytes of memory for a rank, in the order in which ranks fill them: then no node has
    more than its kind.
    """

    ranks: int
    vocabulary: int
    ranks_per_node: int | None = None
    kinds: tuple[tuple[str, int, float], ...] = ()
    measured: int | None = None
    """Bytes of a process without a model, where they were measured before: this one grows as it plans."""

    @cached_property
    def _shared(self) -> int:
        """Bytes that ranks of a node have in common."""
        return shared_resident_bytes()

    @cached_property
    def _libraries(self) -> int:
        return library_bytes() if self.measured is None else self.measured

    def libraries(self, deck: Deck) -> int:
        """Bytes of a process that has no model, where they count; to be asked for before others are made."""
        return self._libraries if on_host(device_kind(deck.run.device)) else 0

    def shared(self, deck: Deck) -> int:
        """Of these, what ranks of a node have in common."""
        return self._shared if on_host(device_kind(deck.run.device)) else 0

    def together(self, deck: Deck) -> int:
        """Ranks that share a node's memory; emulated nodes have theirs on one machine."""
        machine = deck.machine
        return min(
            self.ranks, self.ranks_per_node or machine.ranks_per_node or machine.gpus_per_node or self.ranks
        )

    def with_products(self, deck: Deck) -> Deck:
        """The deck with what is known to multiply quickest here."""
        return with_cached_kernels(deck.with_keys(model={"vocabulary": self.vocabulary}), self.ranks)

    def memory(self, deck: Deck) -> MemoryPlan:
        """What every rank holds. HpctrainError as a run would."""
        plan = plan_run_memory if deck.communication.server is None else plan_served
        return plan(
            self.with_products(deck), self.ranks, self.vocabulary, self.libraries(deck), self._nodes(deck)
        )

    def memory_of(self, deck: Deck, schedule: Schedule, split: Sequence[int]) -> MemoryPlan:
        """As `memory`, where its schedule and the blocks of each part are known."""
        known, libraries = self.with_products(deck), self.libraries(deck)
        return plan_run_memory(
            known, self.ranks, self.vocabulary, libraries, self._nodes(deck), split, schedule
        )

    def _nodes(self, deck: Deck) -> int | None:
        return self.ranks_per_node or deck.communication.ranks_per_node or deck.machine.ranks_per_node

    def limit(self, deck: Deck) -> tuple[MemoryLimit, int] | None:
        """What ranks that share memory may hold together, and how many they are: those of a node, or on GPUs
        of one. By the deck or, where it does not say, this machine; None where that is not known.
        """
        machine, device = deck.machine, device_kind(deck.run.device)
        together = self.together(deck)
        if not on_host(device):
            together = -(-together // (machine.gpus_per_node or together))
        limits = limits_of(machine, device, os.environ)
        return (min(limits, key=lambda limit: limit.bytes), together) if limits else None

    def sharing(self, deck: Deck) -> int:
        """Ranks that share what is limited: those of a node, or on GPUs of one."""
        limit = self.limit(deck)
        return self.together(deck) if limit is None else limit[1]

    def of_mean_rank(self, deck: Deck) -> float:
        """Bytes that a rank may hold, in the mean over those that share memory; endless if not known."""
        return max(most for most, _ in self.of_mean_ranks(deck))

    def of_mean_ranks(self, deck: Deck) -> list[tuple[float, int]]:
        """As `of_mean_rank`, on each kind of node, with how many ranks lie there, in their order."""
        limit = self.limit(deck)
        if limit is None:
            return [(inf, self.ranks)]
        (most, together), shared = (limit[0].bytes, limit[1]), self.shared(deck) * (limit[1] - 1)
        if not self.kinds:
            return [((most + shared) / together, self.ranks)]
        found, left = [], self.ranks
        for number, (_, nodes, size) in enumerate(self.kinds, 1):
            ranks = left if number == len(self.kinds) else min(left, nodes * self.together(deck))
            found.append(((min(most, int(size * together)) + shared) / together, ranks))
            left -= ranks
        return [each for each in found if each[1]]

    def room(self, deck: Deck, memory: MemoryPlan) -> Room | None:
        """What the ranks that share memory need, against what they may have; None where that is not known."""
        limit = self.limit(deck)
        if limit is None:
            return None
        on_cpu = on_host(device_kind(deck.run.device))
        given = deck.machine.memory if on_cpu else deck.machine.gpu_memory
        host = "this machine" if given is None else "a node"
        (most, together), shared = limit, self.shared(deck)
        reserve = 0.0 if on_cpu else SEARCH_RESERVE
        if not self.kinds:
            return Room(host, together, memory.max_node_bytes(together, shared), most, reserve)
        rooms = []
        for number, needed in enumerate(memory.bytes_by_node(together, shared)):
            name, size = self._kind_of(number * together // self.together(deck))
            own = MemoryLimit(most.pool, min(most.bytes, int(size * together)), "of memory")
            rooms.append(Room(f"a node of {name}", together, needed, own, reserve))
        return max(rooms, key=lambda room: room.needed / room.limit.bytes)

    def _kind_of(self, node: int) -> tuple[str, float]:
        """The name of a node's kind, and its bytes of memory for a rank; the last one's beyond all."""
        ends = accumulate(nodes for _, nodes, _ in self.kinds)
        number = sum(end <= node for end in ends)
        name, _, size = self.kinds[min(number, len(self.kinds) - 1)]
        return name, size
