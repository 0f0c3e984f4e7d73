"""Whether what ranks will hold fits into what their nodes have."""

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
class Claim:
    """What one rank will hold, in bytes, and the limits that it has to keep with other ranks of its node.

    Of `needed`, `shared` is memory that all ranks of the node have in common.
    """

    node: int
    host: str
    needed: int
    shared: int
    limits: tuple[MemoryLimit, ...]


@dataclass(frozen=True)
class Room:
    """What the ranks of a node that share a limit need together, in bytes, and that limit.

    A layout that is chosen leaves the share `reserve` of the limit free.
    """

    host: str
    ranks: int
    needed: int
    limit: MemoryLimit
    reserve: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether there is as much as they need."""
        return self.needed <= self.limit.bytes

    @property
    def leaves_reserve(self) -> bool:
        """True if the ranks need no more than what the reserve leaves."""
        return self.needed <= (1 - self.reserve) * self.limit.bytes

    def __str__(self) -> str:
        who = "1 rank needs" if self.ranks == 1 else f"{self.ranks} ranks need"
        kept = f", {self.reserve:.0%} of it reserved" if self.fits and not self.leaves_reserve else ""
        return f"{who} {format_bytes(self.needed)} on {self.host}, which has {self.limit}{kept}"


def tightest(claims: Iterable[Claim]) -> Room | None:
    """Of all limits of all nodes, the one of which most is needed; None where no limit is known."""
    shares: dict[tuple[int, str], list[tuple[Claim, MemoryLimit]]] = {}
    for claim in claims:
        for limit in claim.limits:
            shares.setdefault((claim.node, limit.pool), []).append((claim, limit))
    rooms = []
    for share in shares.values():
        common = max(claim.shared for claim, _ in share)
        needed = common + sum(claim.needed - claim.shared for claim, _ in share)
        least = min((limit for _, limit in share), key=lambda limit: limit.bytes)
        rooms.append(Room(share[0][0].host, len(share), needed, least))
    return max(rooms, key=lambda room: room.needed / room.limit.bytes, default=None)


def limits_of(
    machine: Machine, device: torch.device, environment: Mapping[str, str]
) -> tuple[MemoryLimit, ...]:
    """The limits of what this process may hold on that device: those of the deck, else those it finds."""
    if not on_host(device):
        size = gpu_memory_bytes(device) if machine.gpu_memory is None else machine.gpu_memory
        if size is None:
            return ()
        name = f"GPU {device.index or 0}"
        # Ranks that see one GPU each give it the same number, whichever it is. A plan has no GPU.
        pool = name if device == torch.device(device.type) else str(gpu_identity(device))
        return (MemoryLimit(pool, size, f"on {name}"),)
    if machine.memory is not None:
        return (MemoryLimit("node", machine.memory, "of memory (machine.memory)"),)
    return tuple(memory_limits(environment))


def demand_room(
    world: World, machine: Machine, name: str, needed: int, advice: Callable[[Room], str]
) -> None:
    """HpctrainError on all ranks where those of some node need more than it has. Collective.

    `needed` are the bytes that this rank will hold in all; the error begins with `name` and ends with
    `advice` for the node that lacks most. Where there is as much, but others hold it at present, that is a
    warning.
    """
    on_cpu = on_host(world.device)
    shared = min(needed, shared_resident_bytes()) if on_cpu else 0
    limits = limits_of(machine, world.device, os.environ)
    claim = Claim(world.node, world.hostname, needed, shared, limits)
    room = tightest(world.everyone.all_gather_object(claim))
    with world.agreement():
        if room is not None and not room.fits and world.rank == 0:
            raise HpctrainError(f"{name}: does not fit into memory: {room}; {advice(room)}")
    if not on_cpu or machine.memory is not None:
        return
    more = max(0, needed - resident_bytes())
    ranks = world.everyone.all_gather_object((world.node, world.hostname, more, available_bytes()))
    for node in sorted({rank[0] for rank in ranks}) if world.rank == 0 else ():
        _, hostname, _, free = next(rank for rank in ranks if rank[0] == node)
        wanted = sum(rank[2] for rank in ranks if rank[0] == node)
        if free is not None and wanted > free:
            sentence = "%s has only %s of its memory free, of which its ranks will need %s"
            sizes = format_bytes(free), format_bytes(wanted)
            logging.getLogger("hpctrain").warning(sentence, hostname, *sizes)
