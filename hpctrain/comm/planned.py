"""Mesh and groups of ranks that do not exist, for plans: calls are counted, but nothing is moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call
from hpctrain.comm.group import Group, GroupTransports
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.mesh import GroupSource, communicator_axes, rank_count, ranks_along
from hpctrain.comm.transports.hierarchical import hierarchical_scratch_bytes, is_common, is_hierarchical
from hpctrain.comm.transports.mpi import mpi_scratch_bytes
from hpctrain.comm.transports.shared import LEAST_SHARED_BYTES
from hpctrain.comm.transports.traffic import Traffic, traffic_of
from hpctrain.comm.transports.transport import Transport, TransportWork
from hpctrain.host.device import on_host
from hpctrain.host.topology import ranks_per_node_of

META = torch.device("meta")
HOST = torch.device("cpu")

CallObserver = Callable[[Call, Traffic], "TransportWork | None"]
"""Function that receives each call of a planned group, and may return a handle to wait for."""


ReductionBytes = Callable[[int, int, int, bool], int]
"""Function of (elements, itemsize, ranks, scattered) that returns what `Transport.scratch_bytes` returns."""


@dataclass(frozen=True)
class PlannedCalls:
    """Behavior of the calls of planned groups.

    Attributes:
        observer: Function that is called with each call; None for none.
        echo: True if tensors are in CPU memory and each call copies the rank's input into its output.
        reduction_bytes: Function that returns the host memory of reductions under a TransportDecorator.
    """

    observer: CallObserver | None = None
    echo: bool = False
    reduction_bytes: ReductionBytes | None = None


class PlannedTransport(Transport):
    """Transport that completes every call at once and moves nothing. It is its own ObjectCommunicator.

    Args:
        rank: Rank in the group.
        size: Number of ranks.
        calls: Behavior of calls.
        shared: True if ranks of a node would see each other's memory, False if they would use MPI.
        nodes: Node of each rank; None if each rank is a node of its own.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        calls: PlannedCalls | None = None,
        shared: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size, self.nodes = rank, size, nodes
        self.calls = calls or PlannedCalls()
        self.local_size = ranks_per_node_of(nodes) if shared and nodes is not None else 0
        self.sharers = max(1, self.local_size)

    @override
    def run(self, call: Call) -> TransportWork | None:
        """Call the observer, if there is one, with the call and its traffic.

        Local; moves nothing and does not wait.

        Returns:
            What the observer returns; None without an observer. None means that the call is complete, even if
            it is not blocking.
        """
        observer = self.calls.observer
        if observer is None:
            return None
        once = self.crosses_links_once(call)
        return observer(call, traffic_of(call, self.rank, self.size, self.nodes, once))

    @override
    def crosses_links_once(self, call: Call) -> bool:
        local = self.local_size
        return 1 < local < self.size and is_hierarchical(call, self.size // local, local)

    @override
    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return zeros of this rank alone if ranks of a real run would share such a tensor; otherwise None.

        Local. Ranks would share it if several ranks of the group are on each node and see each other's
        memory. In a group of several nodes, it must also be large enough. Each call returns a new tensor and
        is not counted.

        Args:
            length: Number of elements.
            dtype: Type of the elements.
            device: Device of the tensor, which has no memory on the meta device.
        """
        common = self.local_size == self.size or is_common(length, dtype)
        return torch.zeros(length, dtype=dtype, device=device) if self.sharers > 1 and common else None

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        reduction_bytes = self.calls.reduction_bytes
        if reduction_bytes is not None and self.size > 1:
            return reduction_bytes(elements, itemsize, self.size, scattered)
        local = self.local_size
        if local > 1 and elements * itemsize >= LEAST_SHARED_BYTES:
            if local == self.size:
                return 0
            return hierarchical_scratch_bytes(elements, itemsize, self.size // local, local, scattered)
        return mpi_scratch_bytes(elements, itemsize, self.size, scattered)

    def allgather(self, value: Any, /) -> list[Any]:
        """Return a list with the value of this rank, `size` times. Local."""
        return [value] * self.size

    def bcast(self, value: Any, root: int, /) -> Any:  # noqa: ARG002
        """Return the value of this rank, whichever rank is `root`. Local."""
        return value


class EchoTransport(PlannedTransport):
    """Transport that fills the output of a call with copies of its input."""

    @override
    def run(self, call: Call) -> None:
        """Copy the call's input into its output, repeated as often as it fits, at once. Local.

        Nothing happens without one of the two, or if they are the same memory.
        """
        tensor, output = call.tensor, call.output
        if tensor is None or output is None or output.data_ptr() == tensor.data_ptr():
            return
        source, target = tensor.detach().view(-1), output.detach().view(-1)
        for first in range(0, target.numel(), max(1, source.numel())):
            piece = target[first : first + source.numel()]
            piece.copy_(source[: piece.numel()])


def planned_group(
    axes: tuple[str, ...],
    rank: int,
    size: int,
    ledger: Ledger,
    ranks: tuple[int, ...] | None = None,
    transport: PlannedTransport | None = None,
    device: torch.device = META,
) -> Group:
    """Return a group whose other ranks do not exist. Local; none of its operations waits for other ranks.

    With the default transport, operations leave their tensors unchanged, and new outputs are not filled.
    `all_gather_object` returns this rank's value once for each rank, and `broadcast_object` returns it as it
    is.

    Args:
        axes: Names of its axes.
        rank: Rank of this process in the group.
        size: Number of ranks.
        ledger: Ledger that counts the calls.
        ranks: Ranks of the world; by default 0 to size - 1.
        transport: Transport that runs the calls; by default they complete without doing anything.
        device: Device of tensors that the group allocates; by default torch's meta device, so that they have
            no memory.
    """
    transport = transport or PlannedTransport(rank, size)
    transports = GroupTransports(transport, transport, transport)
    group = Group(axes, ranks or tuple(range(size)), transports, device, ledger, set())
    group.computes_on = HOST
    return group


class PlannedMesh(GroupSource):
    """Mesh of ranks that do not exist, as one of its ranks sees it. All methods are local.

    Args:
        sizes: Number of ranks along each of AXES, and along those of experts if there are any.
        stage: Pipeline stage of the rank.
        ranks_per_node: Number of consecutive ranks that share a node.
        device: Device that the ranks would compute on.
        rank_in_stage: Number of the rank among the ranks of its pipeline stage, from 0.
        transport: Name of the transport that the ranks would use, as in the deck.
        calls: Behavior of the calls of its groups.

    Attributes:
        communicating_groups: All groups that were made so far and have communicators of their own.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        stage: int,
        ranks_per_node: int,
        device: torch.device = HOST,
        rank_in_stage: int = 0,
        transport: str = "mpi",
        calls: PlannedCalls | None = None,
    ) -> None:
        self.sizes = sizes
        self.rank = stage * (rank_count(sizes) // sizes["pipeline"]) + rank_in_stage
        self.ledger = Ledger()
        self._shared = transport in {"auto", "shared"} and on_host(device)
        self._ranks_per_node, self._device = ranks_per_node, device
        self._calls = calls or PlannedCalls()
        self._groups: dict[tuple[str, ...], Group] = {}
        self.communicating_groups: list[Group] = []

    @override
    def group(self, *axes: str) -> Group:
        if axes not in self._groups:
            used = communicator_axes(self.sizes, axes)
            if used != axes:
                self._groups[axes] = self._share(self.group(*used), axes)
            else:
                self._groups[axes] = self._make_group(axes, ranks_along(self.sizes, axes, self.rank), None)
        return self._groups[axes]

    @override
    def nodes(self, group: Group) -> list[int]:
        return self._nodes_of(group.ranks)

    @override
    def _make_group(self, axes: tuple[str, ...], ranks: tuple[int, ...], parent: Group | None) -> Group:
        rank, size = ranks.index(self.rank), len(ranks)
        if self._calls.echo:
            return planned_group(axes, rank, size, self.ledger, ranks, EchoTransport(rank, size), HOST)
        transport = PlannedTransport(rank, size, self._calls, self._shared, self._nodes_of(ranks))
        group = planned_group(axes, rank, size, self.ledger, ranks, transport)
        group.computes_on = self._device
        self.communicating_groups.append(group)
        return group

    def _share(self, group: Group, axes: tuple[str, ...]) -> Group:
        """Return a group of the same ranks over the transport of `group`."""
        transport = group.host
        assert isinstance(transport, PlannedTransport)
        shared = planned_group(
            axes, group.rank, group.size, self.ledger, group.ranks, transport, group.device
        )
        shared.computes_on = group.computes_on
        return shared

    def _nodes_of(self, ranks: Sequence[int]) -> list[int]:
        return [rank // self._ranks_per_node for rank in ranks]
