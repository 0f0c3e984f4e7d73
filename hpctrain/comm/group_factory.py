"""Factory of a world's groups, with the settings that decide which transports they use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from hpctrain.comm.call_check import CallChecks
from hpctrain.comm.group import Group, GroupTransports
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.transports.choose import TRANSPORTS, TransportPair
from hpctrain.comm.transports.emulated import EmulatedLink, EmulatedTransport
from hpctrain.comm.transports.node_memory import NodeMemory, open_node_memory
from hpctrain.comm.transports.process_group import GroupStore, open_store
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.setting import TransportSetting
from hpctrain.comm.work import StartedWork
from hpctrain.host.mpi_library import MPI
from hpctrain.host.topology import Topology

Nodes = tuple[int, ...]
"""Node of each rank of the world of all processes."""


class TransportDecorator(ABC):
    """Extension point: object that wraps the transports of all groups of a world, such as to check messages.

    Without a decorator, calls go to the transports directly.
    """

    @abstractmethod
    def wrap(
        self,
        transports: TransportPair,
        communicator: MPI.Intracomm,
        ranks: Sequence[int],
        scratch: ReductionScratch,
    ) -> TransportPair:
        """Return the transports that a new group uses instead of `transports`. Collective over its ranks.

        Args:
            transports: Transports for host memory and for the accelerator.
            communicator: Communicator of the group. The group's own calls use it, so a decorator that sends
                messages must duplicate it.
            ranks: Ranks of the group in the world of all processes; at least two.
            scratch: Memory that reductions may receive into.
        """

    @abstractmethod
    def for_subworld(self) -> TransportDecorator:
        """Return the decorator of a world that consists of some ranks of this one. Local."""


class GroupFactory:
    """Maker of the groups of a world.

    Args:
        topology: Nodes of the ranks.
        ledger: Ledger of this rank.
        parent: Factory of the world that this one is a part of, whose memory and link it uses; None if there
            is none.

    Attributes:
        ranks: For each rank of this world, its rank in the world of all processes.
        scratch: Memory that reductions receive into.
        memories: Shared memory of this node, once for each division into nodes for which it was opened.
        native_half_sums: True if process groups of groups that are made from now on add 16-bit floats
            themselves.
        store: Store in which the ranks of process groups find each other; None before `open_store`.
        checks: Comparison of calls in groups that are made from now on; None if calls are not compared.
        link: Emulated link of this rank, which groups that are made from now on use; None if none is
            emulated.
        decorator: Decorator of the transports of groups that are made from now on; None if there is none.
    """

    def __init__(self, topology: Topology, ledger: Ledger, parent: GroupFactory | None = None) -> None:
        self.topology, self.ledger = topology, ledger
        self.ranks: tuple[int, ...] = ()
        self.scratch: ReductionScratch = ReductionScratch() if parent is None else parent.scratch
        self.memories: list[NodeMemory] = [] if parent is None else parent.memories
        self.native_half_sums: bool = parent is not None and parent.native_half_sums
        self.store: GroupStore | None = None if parent is None else parent.store
        self.checks: CallChecks | None = None
        self.link: EmulatedLink | None = None if parent is None else parent.link
        self.decorator: TransportDecorator | None = None
        # Keyed by the node of each rank, since the emulation of nodes may be switched on and off.
        self._memory_of: dict[Nodes, NodeMemory | str] = {} if parent is None else dict(parent._memory_of)
        self._in_flight: set[StartedWork[Any]] = set() if parent is None else parent._in_flight

    @property
    def memory(self) -> NodeMemory | str | None:
        """Shared memory of this node, or the reason why it has none; None before `open_memory`.

        It is that of the present nodes: when emulated nodes change, `open_memory` must be called again.
        """
        return self._memory_of.get(self.topology.nodes)

    def open_memory(self, communicator: MPI.Intracomm) -> str:
        """Open memory that the ranks of each node share. Collective over the communicator of the world.

        Nodes are those of `topology` now: the machine's, or those of `World.emulate_nodes`. Groups that are
        made later use the memory. Only the first call for these nodes tries to open any; later ones return
        the same.

        Args:
            communicator: Communicator of all ranks of this world.

        Returns:
            "" if this node has such memory, otherwise the reason why not, which may differ from node to node.
            A group may use it only if all nodes have it; `World.share_memory` returns a reason that is the
            same on all ranks.
        """
        nodes, rank = self.topology.nodes, self.ranks[communicator.rank]
        if nodes not in self._memory_of:
            node = communicator.Split(nodes[rank], communicator.rank)
            assert isinstance(node, MPI.Intracomm)
            opened = self._memory_of[nodes] = open_node_memory(node, rank)
            if isinstance(opened, NodeMemory):
                self.memories.append(opened)
        return self.memory if isinstance(self.memory, str) else ""

    def open_store(self, communicator: MPI.Intracomm) -> None:
        """Open the store of process groups on rank 0, unless one is open. Collective.

        Args:
            communicator: Communicator of all ranks of this world.
        """
        if self.store is None:
            nodes = len(set(self.topology.machine_nodes))
            self.store = open_store(communicator, nodes, self.ranks[communicator.rank])

    def close_memories(self) -> None:
        """Free the MPI windows of all memories of nodes, before MPI is finalized. Local.

        Each window belongs to this rank alone. Groups that use the memory must not communicate any more.
        Tensors in it stay valid as long as they exist.
        """
        for memory in self.memories:
            memory.close()
        self.memories.clear()

    def close_store(self) -> None:
        """Disconnect all process groups, if the store is open. Collective over the world of all processes."""
        if self.store is not None:
            self.store.close()

    def make(
        self,
        axes: tuple[str, ...],
        ranks: tuple[int, ...],
        communicator: MPI.Intracomm,
        transport: str,
        device: torch.device,
    ) -> Group:
        """Make a group of ranks of this world, with transports of its own. Collective over its communicator.

        The communicators are never freed; they exist until MPI is finalized.

        Args:
            axes: Names of its axes.
            ranks: Ranks of this world that it consists of, in the order of the communicator.
            communicator: Communicator of these ranks, which the group uses from now on.
            transport: Name of the transport, one of TRANSPORTS. Other names, also "auto", raise a KeyError.
                Whether it suits the device is not checked. "shared" needs `open_memory` first, otherwise MPI
                messages are used. "nccl" and "gloo" need `open_store` first.
            device: Device on which `Group.empty` allocates tensors.
        """
        root_world_ranks = tuple(self.ranks[rank] for rank in ranks)
        host, accelerator = self.make_transports(axes, communicator, root_world_ranks, transport, device)
        transports = GroupTransports(communicator, host, accelerator)
        group = Group(axes, ranks, transports, device, self.ledger, self._in_flight, root_world_ranks)
        if self.checks is not None:
            self.checks.check_group(group)
        return group

    def share(self, group: Group, axes: tuple[str, ...]) -> Group:
        """Make a group of the same ranks as `group` over its communicators. Collective over the group.

        Calls of both groups go over the same transports, so all ranks must make them in the same order.

        Args:
            group: Group of this factory.
            axes: Names of the axes of the new group, by which logs and the ledger name it.
        """
        transports = GroupTransports(group.objects, group.host, group.accelerator)
        shared = Group(
            axes, group.ranks, transports, group.device, self.ledger, self._in_flight, group.calls.ranks
        )
        shared.calls.communicator = group.calls.communicator
        if self.checks is not None:
            self.checks.check_group(shared)
        return shared

    def make_transports(
        self,
        axes: tuple[str, ...],
        communicator: MPI.Intracomm,
        root_world_ranks: tuple[int, ...],
        transport: str,
        device: torch.device,
    ) -> TransportPair:
        """Make the two transports of a group, with the emulated link and the decorator if there are any.

        Collective over `communicator`. The emulated link and the decorator are the attributes `link` and
        `decorator`; groups of one rank are not decorated.

        Args:
            axes: Names of the group's axes.
            communicator: Communicator of the group's ranks.
            root_world_ranks: Ranks of the group in the world of all processes: `self.ranks[r]` for rank r of
                this world.
            transport: Name of the transport, one of TRANSPORTS.
            device: Device of this rank.

        Returns:
            Transport of tensors in CPU memory, and transport of tensors in GPU memory.
        """
        nodes = [self.topology.nodes[rank] for rank in root_world_ranks]
        memory = self.memory if isinstance(self.memory, NodeMemory) else None
        pair = TRANSPORTS[transport].make(
            TransportSetting(
                communicator, axes, device, nodes, self.scratch, memory, self.store, self.native_half_sums
            )
        )
        if self.link is not None:
            times = communicator.Dup()
            emulates_nodes = self.topology.emulated_ranks_per_node is not None
            link_nodes = nodes if emulates_nodes else list(range(len(root_world_ranks)))
            host, accelerator = pair
            pair = (
                EmulatedTransport(host, times, self.link, link_nodes),
                EmulatedTransport(accelerator, times, self.link, link_nodes),
            )
        if self.decorator is None or len(root_world_ranks) == 1:
            return pair
        return self.decorator.wrap(pair, communicator, root_world_ranks, self.scratch)
