"""Rates of communication: collective operations and messages by size, inside and between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

import torch

from hpctrain.comm.group import Group
from hpctrain.comm.mesh import choose_transport
from hpctrain.comm.world import World
from hpctrain.host.device import on_host
from hpctrain.host.device_memory import gpu_memory_bytes
from hpctrain.host.memory import available_bytes
from hpctrain.plan.calibrate.clock import Clock
from hpctrain.plan.calibrate.overlap import measure_overlap, measure_waits
from hpctrain.plan.calibrate.rate_fit import fit_link
from hpctrain.plan.time.machine_rates import CollectiveRates, LinkRates, Operation

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_FIRST = 1 << 10
_SUM, _LAYER_SUM = 32 << 20, 2 << 20
"""Approximate bytes of a bucket, and of a tensor-parallel reduction."""

_LONG = 1.0
"""Seconds after which no larger message is measured."""

_TENSORS = 4
"""Number of tensors of the measured size that a rank has at the same time, with buffers of messages."""


@dataclass(frozen=True)
class Links:
    """Rates of communication, as in `MachineRates`. Defaults mean that there is no such link."""

    inside: LinkRates | None = None
    between: LinkRates | None = None
    collectives: Mapping[Operation, CollectiveRates] = field(default_factory=dict)
    crossing: Mapping[Operation, tuple[CollectiveRates, ...]] = field(default_factory=dict)
    overlap: float = 0.0
    layer_overlap: float = 0.0
    waits: float = 0.0


def measure_links(clock: Clock, most: int) -> Links:
    """Measure messages of up to `most` bytes. Collective."""
    world = clock.world
    if world.size == 1:
        return Links()
    sizes, node = sizes_up_to(world, most), group_of_node(world)
    inside, between, collectives = None, None, dict[Operation, CollectiveRates]()
    if min(world.everyone.all_gather_object(node.size)) > 1:
        collectives = {each: measure_collective(node, each, sizes, None, clock) for each in OPERATIONS}
        inside = measure_link(node, in_pairs(node.size), sizes, clock)
    crossing: dict[Operation, tuple[CollectiveRates, ...]] = {}
    for together, group in groups_between_nodes(world):
        if group is not None:
            for each in OPERATIONS:
                collective = measure_collective(group, each, sizes, together, clock)
                crossing[each] = (*crossing.get(each, ()), collective)
            if together == 1:
                between = measure_link(group, across(group.size), sizes, clock)
        world.everyone.barrier()
    everyone = world.new_group(("world",), tuple(range(world.size)), choose_transport(world, "auto"))
    overlap = measure_overlap(everyone, min(_SUM, most), True, clock)
    layer_overlap = measure_overlap(everyone, min(_LAYER_SUM, most), False, clock)
    waits = measure_waits(everyone, min(_LAYER_SUM, most), clock)
    links = Links(inside, between, collectives, crossing, overlap, layer_overlap, waits)
    result: Links = world.everyone.broadcast_object(links)
    return result


def sizes_up_to(world: World, most: int) -> list[int]:
    """Return the bytes of tensors to measure, as far as memory allows. Collective.

    Each is four times as large as the one before.
    """
    if on_host(world.device):
        available = (available_bytes() or most) // max(1, world.local_size)
    else:
        available = gpu_memory_bytes(world.device) or most
    bound = min(most, available // (2 * _TENSORS))
    least = -float(world.everyone.all_reduce(torch.tensor(-float(bound), dtype=torch.float64), "max"))
    sizes = [_FIRST]
    while sizes[-1] * 4 <= least:
        sizes.append(sizes[-1] * 4)
    return sizes


def group_of_node(world: World) -> Group:
    """Return the group of all ranks of this rank's node. Collective."""
    nodes = world.nodes_of(range(world.size))
    ranks = tuple(rank for rank, node in enumerate(nodes) if node == nodes[world.rank])
    return world.new_group(("world",), ranks, choose_transport(world, "auto"))


def groups_between_nodes(world: World) -> Iterator[tuple[int, Group | None]]:
    """Yield groups of 1, 2, 4, ... ranks of every node, with that number. Collective.

    The group is None on ranks that are not in it. There is none with a single node.
    """
    nodes = world.nodes_of(range(world.size))
    places = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    least = min(nodes.count(node) for node in set(nodes))
    transport, together = choose_transport(world, "auto"), 1
    while len(set(nodes)) > 1 and together <= least:
        inside = [rank for rank, place in enumerate(places) if place < together]
        ranks = tuple(inside) if world.rank in inside else (world.rank,)
        group = world.new_group(("world",), ranks, transport)
        yield together, group if world.rank in inside else None
        together *= 2


def measure_collective(
    group: Group, operation: Operation, sizes: list[int], together: int | None, clock: Clock
) -> CollectiveRates:
    """Return the seconds of an operation by bytes of the global tensor. Collective over the group."""
    sizes_in_bytes, seconds = list[float](), list[float]()
    for size in sizes:
        count = max(1, size // 4 // group.size)
        global_tensor, local_tensor = (
            group.empty((each,), torch.float32).zero_() for each in (count * group.size, count)
        )
        call = _call(group, operation, global_tensor, local_tensor)
        sizes_in_bytes.append(4.0 * global_tensor.numel())
        seconds.append(clock.group_seconds(operation, group, call))
        if seconds[-1] > _LONG:
            break
    return CollectiveRates(
        ranks=group.size, together=together, bytes=tuple(sizes_in_bytes), seconds=tuple(seconds)
    )


def _call(
    group: Group, operation: Operation, global_tensor: torch.Tensor, local_tensor: torch.Tensor
) -> Callable[[], object]:
    other = torch.empty_like(global_tensor) if operation == "all_to_all" else global_tensor
    calls: dict[Operation, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(global_tensor),
        "reduce_scatter": lambda: group.reduce_scatter(global_tensor, local_tensor),
        "all_gather": lambda: group.all_gather(local_tensor, global_tensor),
        "all_to_all": lambda: group.all_to_all(global_tensor, other),
    }
    return calls[operation]


def measure_link(
    group: Group, peer_of: Callable[[int], int | None], sizes: list[int], clock: Clock
) -> LinkRates:
    """Return the rates of messages between each rank and its peer, half of a round trip. Collective.

    Args:
        group: The ranks.
        peer_of: Function that returns the peer of a rank; None if it has none.
        sizes: Bytes of messages.
        clock: The clock.
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

        seconds.append(clock.group_seconds("messages", group, run) / 2)
        if seconds[-1] > _LONG:
            break
    return fit_link([float(size) for size in sizes[: len(seconds)]], seconds)


def in_pairs(size: int) -> Callable[[int], int | None]:
    """Return the function for the neighbor of each of `size` ranks; the last of an odd number has none."""
    return lambda rank: other if (other := rank ^ 1) < size else None


def across(size: int) -> Callable[[int], int | None]:
    """Return the function for the peer half of all nodes away, for `size` ranks with one on each node."""
    half = size // 2
    return lambda rank: rank + half if rank < half else rank - half if rank < 2 * half else None
