"""A mesh of ranks that are not there: what they are asked to move, the ledger counts, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call
from hpctrain.comm.device import on_host
from hpctrain.comm.group import Group
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.mesh import AXES, EXPERT_AXES, expert_sizes
from hpctrain.comm.topology import ranks_per_node_of
from hpctrain.comm.transports import hierarchical
from hpctrain.comm.transports.hierarchical import is_common, is_hierarchical
from hpctrain.comm.transports.mpi import scratch_bytes
from hpctrain.comm.transports.shared import SHARED_BYTES
from hpctrain.comm.transports.traffic import Traffic, traffic_of
from hpctrain.comm.transports.transport import Transport, TransportWork

META = torch.device("meta")
HOST = torch.device("cpu")

CallObserver = Callable[[Call, Traffic], "TransportWork | None"]
"""What is told of every call that a planned group makes; it may give what is then waited for."""


ReductionBytes = Callable[[int, int, int, bool], int]
"""Host memory, in bytes, that reductions of a transport decorator use; a function of the number of elements,
their size in bytes, the number of ranks, and whether each rank gets a part of the result only."""


class PlannedTransport(Transport):
    """Completes every call at once, unless who hears of it wants otherwise; small values are the same on all
    ranks. Its memory is that of MPI, or, if `shared`, of ranks on `nodes`, None where each has its own, which
    see each other's there. `reduction_bytes` is that of a decorator, which reductions then use.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        heard: CallObserver | None = None,
        shared: bool = False,
        nodes: Sequence[int] | None = None,
        reduction_bytes: ReductionBytes | None = None,
    ) -> None:
        self.rank, self.size, self.heard, self.nodes = rank, size, heard, nodes
        self.reduction_bytes = reduction_bytes
        self.local = ranks_per_node_of(nodes) if shared and nodes is not None else 0
        self.sharers = max(1, self.local)

    @override
    def run(self, call: Call) -> TransportWork | None:
        if self.heard is None:
            return None
        return self.heard(call, traffic_of(call, self.rank, self.size, self.nodes, self.crosses_once(call)))

    @override
    def crosses_once(self, call: Call) -> bool:
        return 1 < self.local < self.size and is_hierarchical(call, self.size // self.local, self.local)

    @override
    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        common = self.local == self.size or is_common(length, dtype)
        return torch.zeros(length, dtype=dtype, device=device) if self.sharers > 1 and common else None

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        if self.reduction_bytes is not None and self.size > 1:
            return self.reduction_bytes(elements, itemsize, self.size, scattered)
        if self.local > 1 and elements * itemsize >= SHARED_BYTES:
            if self.local == self.size:
                return 0
            return hierarchical.scratch_bytes(
                elements, itemsize, self.size // self.local, self.local, scattered
            )
        return scratch_bytes(elements, itemsize, self.size, scattered)

    def allgather(self, value: Any, /) -> list[Any]:
        """Return the objects of all ranks, by rank. Collective."""
        return [value] * self.size

    def bcast(self, value: Any, root: int, /) -> Any:  # noqa: ARG002
        """Return the object of the rank `root`. Collective."""
        return value


class EchoTransport(PlannedTransport):
    """Gives each rank what it sends itself, in the place of what others would send, where there is memory."""

    def run(self, call: Call) -> None:
        """See Transport. What is reduced in place stays."""
        given, received = call.tensor, call.output
        if given is None or received is None or received.data_ptr() == given.data_ptr():
            return
        own, into = given.detach().view(-1), received.detach().view(-1)
        for first in range(0, into.numel(), max(1, own.numel())):
            piece = into[first : first + own.numel()]
            piece.copy_(own[: piece.numel()])


def planned_group(
    axes: tuple[str, ...],
    rank: int,
    size: int,
    ledger: Ledger,
    ranks: tuple[int, ...] | None = None,
    transport: PlannedTransport | None = None,
    device: torch.device = META,
    computes_on: torch.device = HOST,
) -> Group:
    """A group that knows its rank and size, or its `ranks` of the world too, on torch's device "meta"."""
    planned = transport or PlannedTransport(rank, size)
    group = Group(axes, ranks or tuple(range(size)), planned, planned, planned, device, ledger, set())
    group.computes_on = computes_on
    return group


class PlannedMesh:
    """What groups are asked of a mesh, at the `place` of one rank among those of a pipeline stage.

    A node has `ranks_per_node` of its ranks, in their order, which would compute on `device` and, by the
    `transport`, see each other's memory; `reduction_bytes` is as PlannedTransport's. `heard`, where there is
    one, is told of every call. With `echo` groups have memory of the host, where calls give back what they
    are given.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        stage: int,
        ranks_per_node: int,
        heard: CallObserver | None = None,
        echo: bool = False,
        device: torch.device = HOST,
        place: int = 0,
        transport: str = "mpi",
        reduction_bytes: ReductionBytes | None = None,
    ) -> None:
        self._shared = transport in {"auto", "shared"} and on_host(device)
        self._per_node, self._reduction_bytes = ranks_per_node, reduction_bytes
        self._along = {**expert_sizes(sizes), **sizes}
        self._heard, self._echo, self._device = heard, echo, device
        self._rank = stage * self._strides(AXES)["pipeline"] + place
        self.ledger = Ledger()
        self._groups: dict[tuple[str, ...], Group] = {}

    def group(self, *axes: str) -> Group:
        """The group along these axes."""
        if axes not in self._groups:
            ranks = self._ranks(axes)
            self._groups[axes] = self._planned(axes, ranks.index(self._rank), ranks)
        return self._groups[axes]

    def part(self, axis: str, size: int) -> Group:
        """The `size` neighbours along an axis."""
        ranks = self._ranks((axis,))
        first, rank = self._cut(ranks.index(self._rank), size)
        return self._planned((axis,), rank, ranks[first : first + size])

    def cut(self, group: Group, size: int, across: str = "replicas") -> tuple[Group, Group]:
        """The `size` neighbours in a group, and the ranks of all such parts with the same place there."""
        first, rank = self._cut(group.rank, size)
        peers = self._planned((across,), group.rank // size, group.ranks[rank::size])
        return self._planned(group.axes, rank, group.ranks[first : first + size]), peers

    def nodes(self, group: Group) -> list[int]:
        """The node of every rank of a group."""
        return [rank // self._per_node for rank in group.ranks]

    def _planned(self, axes: tuple[str, ...], rank: int, ranks: tuple[int, ...]) -> Group:
        size = len(ranks)
        if self._echo:
            return planned_group(axes, rank, size, self.ledger, ranks, EchoTransport(rank, size), HOST)
        nodes = [each // self._per_node for each in ranks]
        transport = PlannedTransport(rank, size, self._heard, self._shared, nodes, self._reduction_bytes)
        return planned_group(axes, rank, size, self.ledger, ranks, transport, META, self._device)

    def _ranks(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks along axes, of which this one is one."""
        folding = AXES if set(axes) <= set(AXES) else EXPERT_AXES
        strides = self._strides(folding)
        along = [axis for axis in folding if axis in axes]
        own = sum(self._rank // strides[axis] % self._along[axis] * strides[axis] for axis in along)
        steps = [range(0, self._along[axis] * strides[axis], strides[axis]) for axis in along]
        return tuple(self._rank - own + sum(places) for places in product(*steps))

    def _strides(self, folding: Sequence[str]) -> dict[str, int]:
        """How far the ranks that are neighbours along each axis are from each other."""
        return {
            axis: prod(self._along[inner] for inner in folding[place + 1 :])
            for place, axis in enumerate(folding)
        }

    @staticmethod
    def _cut(rank: int, size: int) -> tuple[int, int]:
        """Where the part of `size` begins that a rank is in, and its place there."""
        return rank // size * size, rank % size
