"""Mesh: the ranks as an array with named axes, and the groups along them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from hpctrain.comm.device import identity_of
from hpctrain.comm.group import Group
from hpctrain.comm.transports import TRANSPORTS
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError

AXES = ("pipeline", "data", "context", "expert", "tensor")

# Axes that are joined into one group, besides each axis by itself.
JOINED = (("data", "context"), ("context", "tensor"))


class Mesh:
    """The world's ranks as an array of `sizes`, tensor innermost: neighbours there share a node.

    `sizes` gives ranks along each axis, one where it is not named; their product is the world's size.
    Making one is collective: every group's communicator is made here, on all ranks in one order.
    """

    def __init__(self, world: World, sizes: Mapping[str, int], transport: str = "auto") -> None:
        assert set(sizes) <= set(AXES), sizes
        self.sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        assert prod(self.sizes.values()) == world.size, (self.sizes, world.size)
        self.world = world
        self.transport = choose_transport(world, transport)
        self._here = self.coordinates(world.rank)
        self._groups = {axes: self._group(axes) for axes in (*((axis,) for axis in AXES), *JOINED)}

    def size(self, axis: str) -> int:
        """Ranks along one axis."""
        return self.sizes[axis]

    def coordinate(self, axis: str) -> int:
        """This rank's coordinate along one axis."""
        return self._here[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """One rank's coordinates, along every axis."""
        return coordinates(self.sizes, rank)

    def group(self, *axes: str) -> Group:
        """This rank's group along one axis or several joined ones, in the mesh's order of axes."""
        assert axes in self._groups, f"no group {axes}; there are {list(self._groups)}"
        return self._groups[axes]

    def part(self, axis: str, size: int) -> Group:
        """This rank's group of `size` neighbours along an axis. Collective over the axis."""
        along = self.group(axis)
        assert along.size % size == 0, (axis, along.size, size)
        first = along.rank // size * size
        return self.world.split((axis,), along.ranks[first : first + size], self.transport, along)

    def cut(self, group: Group, size: int) -> tuple[Group, Group]:
        """Of a group's parts of `size` neighbours this rank's, and its peers in all parts. Collective."""
        first = group.rank // size * size
        part = self.world.split(group.axes, group.ranks[first : first + size], self.transport, group)
        peers = group.ranks[group.rank % size :: size]
        return part, self.world.split(("replicas",), peers, self.transport, group)

    def nodes(self, group: Group) -> list[int]:
        """The node of every rank of a group. Collective."""
        return group.all_gather_object(self.world.node)

    def _group(self, axes: tuple[str, ...]) -> Group:
        others = [axis for axis in AXES if axis not in axes]
        ranks = tuple(
            rank
            for rank in range(self.world.size)
            if all(self.coordinates(rank)[axis] == self._here[axis] for axis in others)
        )
        return self.world.split(axes, ranks, self.transport)


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """The coordinates, along every axis, of one rank of a mesh of these sizes."""
    inwards: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, inwards[axis] = divmod(rank, sizes[axis])
    return {axis: inwards[axis] for axis in AXES}


def sizes_text(sizes: Mapping[str, int]) -> str:
    """The ranks along each axis, in words; experts where they are split."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if axis != "expert" or sizes[axis] > 1)


def choose_transport(world: World, wish: str) -> str:
    """What tensors travel over: with "auto" the first of TRANSPORTS that suits the ranks' GPUs.

    Collective. Errors (HpctrainError, on all ranks) where it cannot be used.
    """
    identity = identity_of(world.device)
    # No other GPU of the job has the name; a CPU has none.
    gpus = world.everyone.all_gather_object(identity and f"{world.hostname} {identity}")
    automatic = (name for name, carrier in TRANSPORTS.items() if carrier.suits(gpus))
    name = next(automatic) if wish == "auto" else wish
    with world.agreement():
        obstacles = TRANSPORTS[name].obstacles(gpus)
        if obstacles:
            raise HpctrainError([f'communication.transport = "{wish}": {each}' for each in obstacles])
    return name
