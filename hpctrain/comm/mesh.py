"""Mesh: the ranks as an array with named axes, and the groups along them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import prod

from hpctrain.comm.device import gpu_identity
from hpctrain.comm.group import Group
from hpctrain.comm.transports.choose import TRANSPORTS
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError

AXES = ("pipeline", "data", "context", "tensor")

EXPERT_AXES = ("pipeline", "expert_data", "expert", "expert_tensor")
"""How experts fold the same ranks: those of a pipeline stage lie along other axes."""

# Axes that are joined into one group, besides each axis by itself.
JOINED = (("data", "context"), ("context", "tensor"))
JOINED_OF_EXPERTS = ("expert", "expert_tensor")


class Mesh:
    """The world's ranks as an array of `sizes`, tensor innermost: neighbours there share a node.

    `sizes` gives ranks along each of AXES, one where it is not named; their product is the world's size. For
    a model with experts it names "expert", the ranks over which these are spread, and "expert_tensor", those
    that split each of them: along EXPERT_AXES the ranks lie a second time, "expert_tensor" innermost, so that
    an expert's neighbours share a node too. Making one is collective: every group's communicator is made
    here, on all ranks in one order.
    """

    def __init__(self, world: World, sizes: Mapping[str, int], transport: str = "auto") -> None:
        assert set(sizes) <= {*AXES, "expert", "expert_tensor"}, sizes
        self.sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        assert rank_count(self.sizes) == world.size, (self.sizes, world.size)
        if "expert" in sizes:
            self.sizes |= {axis: sizes.get(axis, 1) for axis in ("expert", "expert_tensor")}
        self.world = world
        self.transport = choose_transport(world, transport)
        self._here = self.coordinates(world.rank)
        folded = expert_sizes(self.sizes)
        self._groups: dict[tuple[str, ...], Group] = {}
        self._groups |= {(axis,): self._group((axis,), AXES) for axis in AXES}
        # Where experts are not split, or there are none, this rank alone is all that there is along an axis.
        alone = world.split(("expert",), (world.rank,), self.transport)
        for axis in EXPERT_AXES[1:]:
            if folded[axis] == 1:
                self._groups[axis,] = alone
            elif "expert" in self.sizes:
                self._groups[axis,] = self._group((axis,), EXPERT_AXES)
        self._groups |= {axes: self._group(axes, AXES) for axes in JOINED}
        split = [self._groups[axis,] for axis in JOINED_OF_EXPERTS if folded[axis] > 1]
        joined = self._group(JOINED_OF_EXPERTS, EXPERT_AXES) if len(split) > 1 else (split or [alone])[0]
        self._groups[JOINED_OF_EXPERTS] = joined

    def size(self, axis: str) -> int:
        """Ranks along one axis."""
        return self.sizes[axis] if axis in self.sizes else expert_sizes(self.sizes)[axis]

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate along one axis."""
        return self._here[axis] if axis in self._here else self._groups[axis,].rank

    def coordinates(self, rank: int) -> dict[str, int]:
        """One rank's coordinates, along every axis; along those of experts where there are any."""
        return coordinates(self.sizes, rank)

    def group(self, *axes: str) -> Group:
        """Return this rank's group along one axis, or along several axes in the mesh's order of axes."""
        assert axes in self._groups, f"no group {axes}; there are {list(self._groups)}"
        return self._groups[axes]

    def part(self, axis: str, size: int) -> Group:
        """Return this rank's group of `size` neighbours along an axis. Collective over the axis."""
        along = self.group(axis)
        assert along.size % size == 0, (axis, along.size, size)
        first = along.rank // size * size
        return self.world.split((axis,), along.ranks[first : first + size], self.transport, along)

    def cut(self, group: Group, size: int, across: str = "replicas") -> tuple[Group, Group]:
        """Split a group into parts of `size` neighbours. Collective.

        Returns:
            This rank's part, and the group of its peers in all parts, along an axis with the name `across`.
        """
        first = group.rank // size * size
        part = self.world.split(group.axes, group.ranks[first : first + size], self.transport, group)
        peers = group.ranks[group.rank % size :: size]
        return part, self.world.split((across,), peers, self.transport, group)

    def nodes(self, group: Group) -> list[int]:
        """The node of every rank of a group."""
        return self.world.nodes_of(group.ranks)

    def _group(self, axes: tuple[str, ...], folding: tuple[str, ...]) -> Group:
        sizes = self.sizes if folding is AXES else expert_sizes(self.sizes)
        others = [axis for axis in folding if axis not in axes]
        here = _fold(sizes, folding, self.world.rank)
        places = ((rank, _fold(sizes, folding, rank)) for rank in range(self.world.size))
        same = (rank for rank, place in places if all(place[axis] == here[axis] for axis in others))
        return self.world.split(axes, tuple(same), self.transport)


def rank_count(sizes: Mapping[str, int]) -> int:
    """Return the number of ranks of a mesh with these sizes."""
    return prod(sizes[axis] for axis in AXES)


def expert_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The ranks along each of EXPERT_AXES: "expert_data" is what the others leave of a pipeline stage.

    Where `sizes` names no experts they are split over no ranks.
    """
    split = {axis: sizes.get(axis, 1) for axis in ("expert", "expert_tensor")}
    stage_ranks = rank_count(sizes) // sizes["pipeline"]
    expert_data, rest = divmod(stage_ranks, prod(split.values()))
    assert rest == 0, sizes
    return {"pipeline": sizes["pipeline"], "expert_data": expert_data} | split


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """The coordinates of one rank of a mesh of these sizes, along every axis; along EXPERT_AXES where `sizes`
    names "expert".
    """
    here = _fold(sizes, AXES, rank)
    return here | _fold(expert_sizes(sizes), EXPERT_AXES, rank) if "expert" in sizes else here


def _fold(sizes: Mapping[str, int], folding: tuple[str, ...], rank: int) -> dict[str, int]:
    inwards: dict[str, int] = {}
    for axis in reversed(folding):
        rank, inwards[axis] = divmod(rank, sizes[axis])
    return {axis: inwards[axis] for axis in folding}


def sizes_text(sizes: Mapping[str, int], least: int = 1) -> str:
    """The ranks along each axis that has at least so many, in words; then those of experts where they are
    split.
    """
    text = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes[axis] >= least)
    split = [f"{axis} {sizes[axis]}" for axis in ("expert", "expert_tensor") if sizes.get(axis, 1) > 1]
    if not split:
        return text
    experts = " x ".join([f"expert_data {expert_sizes(sizes)['expert_data']}", *split])
    return f"{text}, experts {experts}" if text else f"experts {experts}"


def choose_transport(world: World, wish: str) -> str:
    """Return the transport of tensors. Collective.

    With "auto" it is the first one of TRANSPORTS that suits the GPUs of the ranks.

    Raises:
        HpctrainError: The transport cannot be used; raised on all ranks.
    """
    identity = gpu_identity(world.device)
    # No other GPU of the job has the name; a CPU has none.
    gpus = world.everyone.all_gather_object(identity and f"{world.hostname} {identity}")
    automatic = (name for name, carrier in TRANSPORTS.items() if carrier.suits(gpus))
    name = next(automatic) if wish == "auto" else wish
    unseen = world.share_memory() if name == "shared" else ""
    if unseen and wish == "auto":
        if world.rank == 0:
            logging.getLogger("hpctrain").warning("the ranks of a node send messages: %s", unseen)
        name = "mpi"
    with world.agreement():
        obstacles = [*TRANSPORTS[name].obstacles(gpus), *([unseen] if unseen and name == "shared" else [])]
        if obstacles:
            raise HpctrainError([f'communication.transport = "{wish}": {each}' for each in obstacles])
    return name
