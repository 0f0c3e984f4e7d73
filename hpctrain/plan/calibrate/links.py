"""How fast ranks reach each other: sums, gathers, exchanges and messages by size, inside and between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import torch

from hpctrain.comm.group import Group
from hpctrain.comm.host_memory import available_bytes
from hpctrain.comm.mesh import choose_transport
from hpctrain.comm.world import World
from hpctrain.plan.calibrate.clock import Clock
from hpctrain.plan.calibrate.fit import fit_link
from hpctrain.plan.time.machine import Collective, Link, Operation

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_FIRST = 1 << 10
_TENSORS = 4
"""As large as what is measured, on a rank at once, with what messages need in passing."""


def sizes_up_to(world: World, most: int) -> list[int]:
    """Bytes of whole tensors, each four times the one before, as far as memory allows. Collective."""
    available = available_bytes() or most
    bound = min(most, available // (2 * _TENSORS * max(1, world.local_size)))
    least = -float(world.everyone.all_reduce(torch.tensor(-float(bound), dtype=torch.float64), "max"))
    sizes = [_FIRST]
    while sizes[-1] * 4 <= least:
        sizes.append(sizes[-1] * 4)
    return sizes


def group_of_node(world: World) -> Group:
    """This rank and all others of its node. Collective."""
    nodes = world.nodes_of(range(world.size))
    ranks = tuple(rank for rank, node in enumerate(nodes) if node == nodes[world.rank])
    return world.split(("world",), ranks, choose_transport(world, "auto"))


def groups_between_nodes(world: World) -> Iterator[tuple[int, Group | None]]:
    """Groups of 1, 2, 4... ranks of every node, with that number: None on ranks that are in none. Collective;
    nothing where there is one node.
    """
    nodes = world.nodes_of(range(world.size))
    places = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    least = min(nodes.count(node) for node in set(nodes))
    transport, together = choose_transport(world, "auto"), 1
    while len(set(nodes)) > 1 and together <= least:
        inside = [rank for rank, place in enumerate(places) if place < together]
        ranks = tuple(inside) if world.rank in inside else (world.rank,)
        group = world.split(("world",), ranks, transport)
        yield together, group if world.rank in inside else None
        together *= 2


def measure_collective(
    group: Group, operation: Operation, sizes: list[int], together: int | None, clock: Clock
) -> Collective:
    """Seconds of an operation by bytes of the whole tensor. Collective over the group."""
    seconds = []
    for size in sizes:
        count = max(1, size // 4 // group.size)
        whole, part = (group.empty((each,), torch.float32).zero_() for each in (count * group.size, count))
        call = _call(group, operation, whole, part)
        seconds.append(clock.of_group(operation, group, call))
    counted = [float(max(1, size // 4 // group.size) * group.size * 4) for size in sizes]
    return Collective(ranks=group.size, together=together, bytes=tuple(counted), seconds=tuple(seconds))


def _call(
    group: Group, operation: Operation, whole: torch.Tensor, part: torch.Tensor
) -> Callable[[], object]:
    other = torch.empty_like(whole) if operation == "all_to_all" else whole
    calls: dict[Operation, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "reduce_scatter": lambda: group.reduce_scatter(whole, part),
        "all_gather": lambda: group.all_gather(part, whole),
        "all_to_all": lambda: group.all_to_all(whole, other),
    }
    return calls[operation]


def measure_link(group: Group, peer_of: Callable[[int], int | None], sizes: list[int], clock: Clock) -> Link:
    """Of messages there and back, halved, between each rank of the group and the one that `peer_of` tells.
    Collective over the group.
    """
    peer = peer_of(group.rank)
    seconds = []
    for size in sizes:
        memory = torch.zeros(size // 4, device=group.device)

        def run(memory: torch.Tensor = memory) -> None:
            if peer is None:
                return
            if group.rank < peer:
                group.send(memory, peer)
                group.recv(memory, peer)
            else:
                group.recv(memory, peer)
                group.send(memory, peer)

        seconds.append(clock.of_group("messages", group, run) / 2)
    return fit_link([float(size) for size in sizes], seconds)


def in_pairs(size: int) -> Callable[[int], int | None]:
    """Of so many ranks the neighbour of each; of an odd last one nobody."""
    return lambda rank: other if (other := rank ^ 1) < size else None


def across(size: int) -> Callable[[int], int | None]:
    """Of so many ranks, one on each node, the one of a node half of all nodes away."""
    half = size // 2
    return lambda rank: rank + half if rank < half else rank - half if rank < 2 * half else None
