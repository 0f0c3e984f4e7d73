"""Mesh of the ranks along named axes, and the arithmetic of ranks and coordinates."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, product
from math import prod

import torch

from hpctrain.comm.group import Group
from hpctrain.comm.transports.choose import TRANSPORTS
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.host.device import gpu_identity

AXES = ("pipeline", "data", "context", "tensor")

EXPERT_AXES = ("pipeline", "expert_data", "expert", "expert_tensor")
"""Axes along which experts split the ranks of each pipeline stage, instead of data, context and tensor."""

# Axes that are joined into one group, besides each axis by itself.
JOINED = (("data", "context"), ("context", "tensor"))
JOINED_OF_EXPERTS = ("expert", "expert_tensor")


class GroupSource(ABC):
    """Source of the groups that one rank of a mesh belongs to: along axes, and parts of such groups.

    `Mesh` makes groups of running ranks, `PlannedMesh` groups of ranks that do not exist.

    Attributes:
        rank: Rank of the world.
        sizes: Number of ranks along each axis.
    """

    rank: int
    sizes: Mapping[str, int]

    @abstractmethod
    def group(self, *axes: str) -> Group:
        """Return this rank's group along one axis, or along several in the mesh's order of axes. Local.

        Repeated calls return the same group.

        Args:
            axes: Names of the axes. A `Mesh` has each of AXES, those of JOINED, and with experts each of
                EXPERT_AXES and JOINED_OF_EXPERTS; it fails with an AssertionError for others. Axes of experts
                whose size is 1 exist without experts, too. A `PlannedMesh` has all.
        """

    @abstractmethod
    def nodes(self, group: Group) -> list[int]:
        """Return the node of each rank of a group, by rank of the group. Local.

        Emulated nodes count as nodes.
        """

    @abstractmethod
    def _make_group(self, axes: tuple[str, ...], ranks: tuple[int, ...], parent: Group | None) -> Group:
        """Make a group of these ranks. Collective over the group `parent`; None stands for all ranks."""

    def new_subgroup(self, axis: str, size: int | Sequence[int]) -> Group:
        """Split the ranks along an axis into groups of `size` consecutive ranks, and return this rank's.

        Collective over the ranks along the axis, which pass the same arguments. Each call makes new groups,
        which exist until MPI is finalized, so do not call it repeatedly. The group that `group(axis)` returns
        does not change.

        Args:
            axis: Name of a single axis that `group` accepts. It is the only axis of the result.
            size: Number of ranks of each group, or a sequence with the number of ranks of each one. An
                AssertionError is raised if the numbers do not add up to that of ranks along the axis.
        """
        along = self.group(axis)
        sizes = [size] * (along.size // size) if isinstance(size, int) else size
        assert along.size == sum(sizes), (axis, along.size, size)
        borders = pairwise(accumulate(sizes, initial=0))
        first, end = next((first, end) for first, end in borders if along.rank < end)
        return self._make_group((axis,), along.ranks[first:end], along)

    def split_group(self, group: Group, size: int, across: str = "replicas") -> tuple[Group, Group]:
        """Split a group into parts of consecutive ranks, and make groups of these and across them.

        Collective. All ranks of `group` call it. The group itself stays as it is, and each call makes new
        groups.

        Args:
            group: Group that this rank belongs to.
            size: Number of ranks of each part, which divides the size of the group.
            across: Name of the axis of the second result.

        Returns:
            The part that this rank belongs to, with the axes of `group`; and the group of the ranks that have
            the same number in their part, along the axis `across`.
        """
        first = group.rank // size * size
        part = self._make_group(group.axes, group.ranks[first : first + size], group)
        return part, self._make_group((across,), group.ranks[group.rank % size :: size], group)


class Mesh(GroupSource):
    """Ranks of the world as an array with named axes, of which "tensor" varies fastest.

    Consecutive ranks differ along the tensor axis first. So if the size of that axis divides the number of
    ranks per node, all ranks along it share a node.

    A model with experts has a second array of the same ranks, along EXPERT_AXES. Its last axis is
    "expert_tensor", so the same holds for ranks that split one expert. The constructor is collective: it
    makes the communicators of all groups.

    Args:
        world: The world.
        sizes: Number of ranks along each of AXES, 1 by default; their product is the size of the world. For a
            model with experts also "expert", the number of ranks over which experts are spread, and
            "expert_tensor", the number of ranks that split each expert.
        transport: Name of the transport as in the deck.
    """

    def __init__(self, world: World, sizes: Mapping[str, int], transport: str = "auto") -> None:
        assert set(sizes) <= {*AXES, "expert", "expert_tensor"}, sizes
        self.sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        assert rank_count(self.sizes) == world.size, (self.sizes, world.size)
        if "expert" in sizes:
            self.sizes |= {axis: sizes.get(axis, 1) for axis in ("expert", "expert_tensor")}
        self.world, self.rank = world, world.rank
        self.transport = choose_transport(world, transport)
        self._coordinates = self.coordinates(world.rank)
        along = expert_sizes(self.sizes)
        alone = world.new_group(("expert",), (world.rank,), self.transport)
        self._groups: dict[tuple[str, ...], Group] = {
            axes: self._make_group(axes, ranks_along(self.sizes, axes, self.rank), None)
            for axes in connected_axes(self.sizes)
        }
        for axes in JOINED:
            used = communicator_axes(self.sizes, axes)
            if used != axes:
                self._groups[axes] = world.groups.share(self._groups[used], axes)
        # Axes of experts that have size 1 share a group of this rank alone.
        self._groups |= {(axis,): alone for axis in EXPERT_AXES[1:] if along[axis] == 1}
        if JOINED_OF_EXPERTS not in self._groups:
            self._groups[JOINED_OF_EXPERTS] = self._groups[communicator_axes(self.sizes, JOINED_OF_EXPERTS)]

    def size(self, axis: str) -> int:
        """Return the number of ranks along one of AXES or EXPERT_AXES. Local.

        Without experts, "expert" and "expert_tensor" have size 1, and "expert_data" has all ranks of a stage.
        """
        return self.sizes[axis] if axis in self.sizes else expert_sizes(self.sizes)[axis]

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate along one of AXES or EXPERT_AXES, from 0. Local.

        Other names raise an AssertionError. So does "expert_data" in a mesh without experts whose pipeline
        stages have several ranks.
        """
        return self._coordinates[axis] if axis in self._coordinates else self.group(axis).rank

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of any rank of the world along AXES. Local.

        If there are experts, those along EXPERT_AXES are added.
        """
        return coordinates(self.sizes, rank)

    def group(self, *axes: str) -> Group:
        """Return this rank's group along one axis, or along several in the mesh's order of axes. Local.

        The constructor made the groups, so repeated calls return the same one. There is one for each of AXES,
        for ("data", "context"), ("context", "tensor") and ("expert", "expert_tensor"), and for each of
        EXPERT_AXES. In a mesh without experts, "expert_data" has none if a pipeline stage has several ranks,
        and the other groups of experts consist of this rank alone. An AssertionError is raised for no axes,
        for other axes and for another order.
        """
        assert axes in self._groups, f"no group {axes}; there are {list(self._groups)}"
        return self._groups[axes]

    def connect(self) -> None:
        """Send one number through each group, so that its transport has the memory it needs. Collective."""
        for group in dict.fromkeys(self._groups.values()):
            group.all_reduce(torch.zeros(1, device=group.device))

    def nodes(self, group: Group) -> list[int]:
        """Return the node of each rank of a group, by rank of the group. Local.

        Emulated nodes count as nodes.
        """
        return self.world.nodes_of(group.ranks)

    def _make_group(self, axes: tuple[str, ...], ranks: tuple[int, ...], parent: Group | None) -> Group:
        return self.world.new_group(axes, ranks, self.transport, parent)


def choose_transport(world: World, requested: str) -> str:
    """Return the name of the transport for tensors. Collective.

    For "shared", this also opens the memory that the ranks of a node share. If that fails and `requested` is
    "auto", the result is "mpi", and rank 0 logs a warning. For "nccl" and "gloo", it opens the
    store of process groups.

    Args:
        world: The world.
        requested: Name of a transport, or "auto" for the first of TRANSPORTS that suits the GPUs of all
            ranks.

    Raises:
        HpctrainError: The transport cannot be used; raised on all ranks.
    """
    identity = gpu_identity(world.device)
    # The name of a GPU is unique in the job; a CPU has none.
    gpus = world.everyone.all_gather_object(identity and f"{world.hostname} {identity}")
    automatic = (name for name, choice in TRANSPORTS.items() if choice.suits(gpus))
    name = next(automatic) if requested == "auto" else requested
    obstacle = world.share_memory() if name == "shared" else ""
    if obstacle and requested == "auto":
        if world.rank == 0:
            logging.getLogger("hpctrain").warning(
                "the ranks of a node do not share memory, and communicate by MPI messages instead: %s",
                obstacle,
            )
        name = "mpi"
    with world.agreement():
        obstacles = [*TRANSPORTS[name].obstacles(gpus)]
        if obstacle and name == "shared":
            obstacles.append(obstacle)
        if obstacles:
            raise HpctrainError([f'communication.transport = "{requested}": {each}' for each in obstacles])
    if TRANSPORTS[name].uses_store:
        world.open_store()
    return name


def transport_elsewhere(requested: str) -> str:
    """Return the transport that a mesh requests on a machine for which the deck was perhaps not written.

    Models of checkpoints, which generate text, are loaded anywhere. "nccl" and "shared" depend on GPUs and
    memory of the machine, and are what "auto" chooses where they can be used. "mpi" and "gloo" can be used
    everywhere, so they stay.

    Args:
        requested: Transport that the deck requests.
    """
    return requested if requested in {"mpi", "gloo"} else "auto"


def connected_axes(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the axes of the groups that have communicators of their own, in the order of their creation.

    All ranks of a mesh make the communicators in this order, so that no rank waits for another one in it.

    Args:
        sizes: Number of ranks along each of AXES, and of experts if there are any.
    """
    along, axes = expert_sizes(sizes), [(axis,) for axis in AXES]
    if "expert" in sizes:
        axes += [(axis,) for axis in EXPERT_AXES[1:] if along[axis] > 1]
    joined = [*JOINED, *([JOINED_OF_EXPERTS] if "expert" in sizes else [])]
    return axes + [each for each in joined if communicator_axes(sizes, each) == each]


def communicator_axes(sizes: Mapping[str, int], axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of the group whose communicators a mesh's group along `axes` uses.

    That is the group itself, unless at most one of the joined axes has more than one rank: then the group has
    the same ranks as that along this axis, and uses its communicators.

    Args:
        sizes: Number of ranks along each of AXES, and of experts if there are any.
        axes: Some of AXES or of EXPERT_AXES.
    """
    if axes not in (*JOINED, JOINED_OF_EXPERTS):
        return axes
    along = {**expert_sizes(sizes), **sizes}
    split = [axis for axis in axes if along[axis] > 1]
    return axes if len(split) > 1 else (split[0] if split else axes[0],)


def rank_count(sizes: Mapping[str, int]) -> int:
    """Return the number of ranks of a mesh: the product of its sizes along all of AXES."""
    return prod(sizes[axis] for axis in AXES)


def expert_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of ranks along each of EXPERT_AXES, by its name.

    The size of "expert_data" is the number of ranks of a pipeline stage (data x context x tensor) divided by
    expert x expert_tensor. If this product does not divide it, an AssertionError is raised. Without experts
    in `sizes`, both are 1, and "expert_data" has all ranks of the stage.

    Args:
        sizes: Number of ranks along each of AXES, and along "expert" and "expert_tensor" if there are
            experts.
    """
    split = {axis: sizes.get(axis, 1) for axis in ("expert", "expert_tensor")}
    stage_ranks = rank_count(sizes) // sizes["pipeline"]
    expert_data, rest = divmod(stage_ranks, prod(split.values()))
    assert rest == 0, sizes
    return {"pipeline": sizes["pipeline"], "expert_data": expert_data} | split


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return the coordinates, from 0, of a rank along AXES, and along EXPERT_AXES if `sizes` has "expert".

    Args:
        sizes: Number of ranks along each of AXES, and of experts if there are any.
        rank: Rank of the world.
    """
    result = _unravel(sizes, AXES, rank)
    return result | _unravel(expert_sizes(sizes), EXPERT_AXES, rank) if "expert" in sizes else result


def ranks_along(sizes: Mapping[str, int], axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` only in their coordinates along `axes`, in rising order.

    Args:
        sizes: Number of ranks along each of AXES, and along "expert" and "expert_tensor" if there are
            experts. They are needed for any `axes`: the size of "expert_data" follows from them.
        axes: Some of AXES, or some of EXPERT_AXES, in any order.
        rank: Rank of the world, which is one of the result.
    """
    order = AXES if set(axes) <= set(AXES) else EXPERT_AXES
    sizes = sizes if order is AXES else expert_sizes(sizes)
    here = _unravel(sizes, order, rank)
    strides = {axis: prod(sizes[inner] for inner in order[index + 1 :]) for index, axis in enumerate(order)}
    first = rank - sum(here[axis] * strides[axis] for axis in axes)
    steps = [range(0, sizes[axis] * strides[axis], strides[axis]) for axis in order if axis in axes]
    return tuple(first + sum(offsets) for offsets in product(*steps))


def _unravel(sizes: Mapping[str, int], order: tuple[str, ...], rank: int) -> dict[str, int]:
    """Return the coordinates of a rank along the axes `order`, of which the last one varies fastest."""
    reverse: dict[str, int] = {}
    for axis in reversed(order):
        rank, reverse[axis] = divmod(rank, sizes[axis])
    return {axis: reverse[axis] for axis in order}


def sizes_text(sizes: Mapping[str, int], least: int = 1) -> str:
    """Return the sizes of a mesh in words, such as "data 4 x tensor 2, experts expert_data 2 x expert 2".

    Args:
        sizes: Number of ranks along each of AXES, and of experts if there are any.
        least: Smallest size of one of AXES that is mentioned. Of the axes of experts, "expert" and
            "expert_tensor" are mentioned from 2 on, with "expert_data".

    Returns:
        The text; "" if no axis is as large.
    """
    text = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes[axis] >= least)
    split = [f"{axis} {sizes[axis]}" for axis in ("expert", "expert_tensor") if sizes.get(axis, 1) > 1]
    if not split:
        return text
    experts = " x ".join([f"expert_data {expert_sizes(sizes)['expert_data']}", *split])
    return f"{text}, experts {experts}" if text else f"experts {experts}"
