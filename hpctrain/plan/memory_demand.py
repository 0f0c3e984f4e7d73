"""Comparison of the memory that ranks need with the memory of their nodes or GPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from hpctrain.comm.world import World
from hpctrain.deck.sections.machine import Machine
from hpctrain.errors import HpctrainError
from hpctrain.host.device import gpu_identity, on_host
from hpctrain.host.device_memory import gpu_memory_bytes
from hpctrain.host.memory import (
    MemoryLimit,
    available_bytes,
    memory_limits,
    resident_bytes,
    shared_resident_bytes,
)
from hpctrain.units import format_bytes


@dataclass(frozen=True)
class RankDemand:
    """Memory that one rank needs, and the limits that apply to it and to other ranks of its node.

    Attributes:
        node: Number of its node.
        host: Hostname of its node.
        needed: Bytes that the rank needs, including `shared`.
        shared: Bytes that all ranks of the node have in common, so that they count once for a node.
        limits: Limits of the memory that the rank may use.
    """

    node: int
    host: str
    needed: int
    shared: int
    limits: tuple[MemoryLimit, ...]


@dataclass(frozen=True)
class MemoryDemand:
    """Memory that the ranks of a node or GPU need together, and its limit.

    Attributes:
        host: Node or machine in messages, such as a hostname or "a node".
        ranks: Number of ranks that share the limit.
        needed: Bytes that they need.
        limit: The limit.
        reserve: Share of the limit that a search for layouts leaves free.
    """

    host: str
    ranks: int
    needed: int
    limit: MemoryLimit
    reserve: float = 0.0

    @property
    def fits(self) -> bool:
        """True if the ranks need no more than the limit."""
        return self.needed <= self.limit.bytes

    @property
    def leaves_reserve(self) -> bool:
        """True if the ranks need no more than what the reserve leaves."""
        return self.needed <= (1 - self.reserve) * self.limit.bytes

    def __str__(self) -> str:
        who = "1 rank needs" if self.ranks == 1 else f"{self.ranks} ranks need"
        kept = f", {self.reserve:.0%} of it reserved" if self.fits and not self.leaves_reserve else ""
        return f"{who} {format_bytes(self.needed)} on {self.host}, which has {self.limit}{kept}"


def largest_demand(ranks: Iterable[RankDemand]) -> MemoryDemand | None:
    """Return the demand that takes the largest share of its limit; None if no limit is known."""
    sharing_ranks: dict[tuple[int, str], list[tuple[RankDemand, MemoryLimit]]] = {}
    for rank in ranks:
        for limit in rank.limits:
            sharing_ranks.setdefault((rank.node, limit.pool), []).append((rank, limit))
    demands = []
    for pairs in sharing_ranks.values():
        shared = max(rank.shared for rank, _ in pairs)
        needed = shared + sum(rank.needed - rank.shared for rank, _ in pairs)
        least = min((limit for _, limit in pairs), key=lambda limit: limit.bytes)
        demands.append(MemoryDemand(pairs[0][0].host, len(pairs), needed, least))
    return max(demands, key=lambda demand: demand.needed / demand.limit.bytes, default=None)


def process_limits(
    machine: Machine, device: torch.device, environment: Mapping[str, str]
) -> tuple[MemoryLimit, ...]:
    """Return the limits of this process's memory on a device: that of the deck, or else those of the machine.

    Args:
        machine: Section [machine] of the deck.
        device: Device on which the process computes.
        environment: Environment variables.
    """
    if not on_host(device):
        size = gpu_memory_bytes(device) if machine.gpu_memory is None else machine.gpu_memory
        if size is None:
            return ()
        name = f"GPU {device.index or 0}"
        # The number cannot identify a GPU: ranks that each see only one GPU all number it 0. In a plan, the
        # device has no number, and there may be no GPU whose identity could be read.
        pool = name if device == torch.device(device.type) else str(gpu_identity(device))
        return (MemoryLimit(pool, size, f"on {name}"),)
    if machine.memory is not None:
        return (MemoryLimit("node", machine.memory, "of memory (machine.memory)"),)
    return tuple(memory_limits(environment))


def require_memory(
    world: World, machine: Machine, name: str, needed: int, advice: Callable[[MemoryDemand], str]
) -> None:
    """Raise an error on all ranks if ranks need more memory than their node or GPU has. Collective.

    If the node has enough memory, but other processes use it now, rank 0 logs a warning.

    Args:
        world: All ranks.
        machine: Section [machine] of the deck.
        name: Beginning of the error.
        needed: Bytes that this rank will need in all.
        advice: Function that returns the end of the error, for the demand that exceeds its limit most.

    Raises:
        HpctrainError: The ranks of some node need too much.
    """
    on_cpu = on_host(world.device)
    shared = min(needed, shared_resident_bytes()) if on_cpu else 0
    limits = process_limits(machine, world.device, os.environ)
    own = RankDemand(world.node, world.hostname, needed, shared, limits)
    demand = largest_demand(world.everyone.all_gather_object(own))
    with world.agreement():
        if demand is not None and not demand.fits and world.rank == 0:
            raise HpctrainError(f"{name}: does not fit into memory: {demand}; {advice(demand)}")
    if on_cpu and machine.memory is None:
        _warn_of_used_memory(world, max(0, needed - resident_bytes()))


def _warn_of_used_memory(world: World, further: int) -> None:
    """Log a warning on rank 0 for each node whose free memory is less than what its ranks still need.

    Collective.

    Args:
        world: All ranks.
        further: Bytes that this rank will allocate.
    """
    ranks = world.everyone.all_gather_object((world.node, world.hostname, further, available_bytes()))
    for node in sorted({rank[0] for rank in ranks}) if world.rank == 0 else ():
        _, hostname, _, free = next(rank for rank in ranks if rank[0] == node)
        needed = sum(rank[2] for rank in ranks if rank[0] == node)
        if free is not None and needed > free:
            sentence = "%s has only %s of its memory free, but its ranks will allocate %s more"
            sizes = format_bytes(free), format_bytes(needed)
            logging.getLogger("hpctrain").warning(sentence, hostname, *sizes)
