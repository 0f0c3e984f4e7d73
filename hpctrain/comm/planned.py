"""A mesh of ranks that are not there: what they are asked to move, the ledger counts, and nothing moves."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.group import Group
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.mesh import AXES, EXPERT_AXES, coordinates, expert_sizes, rank_count
from hpctrain.comm.mpi import scratch_bytes
from hpctrain.comm.transport import Transport

META = torch.device("meta")


class PlannedTransport(Transport):
    """Completes every call at once; small values are the same on all ranks. Its memory is that of MPI."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def run(self, call: Call) -> None:
        """See Transport."""

    def scratch_bytes(self, elements: int, itemsize: int) -> int:
        """See Transport."""
        return scratch_bytes(elements, itemsize, self.size)

    def allgather(self, value: Any, /) -> list[Any]:
        """See Objects."""
        return [value] * self.size

    def bcast(self, value: Any, root: int, /) -> Any:  # noqa: ARG002
        """See Objects."""
        return value


def planned_group(axes: tuple[str, ...], rank: int, size: int, ledger: Ledger) -> Group:
    """A group that knows its rank and size alone, on torch's device "meta"."""
    planned = PlannedTransport(rank, size)
    return Group(axes, tuple(range(size)), planned, planned, planned, META, ledger, set())


class PlannedMesh:
    """What groups are asked of a mesh, at the place of the first rank of a pipeline stage.

    A node has `ranks_per_node` of its ranks, in their order.
    """

    def __init__(self, sizes: Mapping[str, int], stage: int, ranks_per_node: int) -> None:
        self._sizes, self._stage, self._per_node = dict(sizes), stage, ranks_per_node
        self._along = {**expert_sizes(sizes), **sizes}
        self._ledger = Ledger()
        self._groups: dict[tuple[str, ...], Group] = {}

    def group(self, *axes: str) -> Group:
        """The group along these axes."""
        if axes not in self._groups:
            size = prod(self._along[axis] for axis in axes)
            rank = self._stage if axes == ("pipeline",) else 0
            self._groups[axes] = planned_group(axes, rank, size, self._ledger)
        return self._groups[axes]

    def part(self, axis: str, size: int) -> Group:
        """The first `size` ranks along an axis."""
        return planned_group((axis,), 0, size, self._ledger)

    def cut(self, group: Group, size: int) -> tuple[Group, Group]:
        """The first `size` ranks of a group, and the first ranks of all such parts."""
        peers = planned_group(("replicas",), 0, group.size // size, self._ledger)
        return planned_group(group.axes, 0, size, self._ledger), peers

    def nodes(self, group: Group) -> list[int]:
        """The node of every rank of a group."""
        here = {"pipeline": self._stage}
        folding = AXES if set(group.axes) <= set(AXES) else EXPERT_AXES
        others = [axis for axis in folding if axis not in group.axes]
        located = (
            (rank, coordinates({"expert": 1, **self._sizes}, rank)) for rank in range(rank_count(self._sizes))
        )
        return [
            rank // self._per_node
            for rank, along in located
            if all(along[axis] == here.get(axis, 0) for axis in others)
        ]
