"""Transports over process groups of torch, and how the ranks of a process group find each other.

MPI brings the ranks together. Rank 0 of the world opens one store, whose address travels by MPI. Each group
has its own prefix in the store, which its rank 0 chooses and sends by MPI. NCCL's unique ids and gloo's
addresses pass through it. Process groups are made with their Group and connect all its ranks at once, never
at a first message.
"""

from __future__ import annotations

import logging
import socket
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.reduction import HALVES, reduce_in_rank_order
from hpctrain.comm.transports.transport import (
    ElementRange,
    PairwiseTransport,
    PieceExchange,
    TransportWork,
    flat_view,
    run_steps,
)
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed import Work as TorchWork

    from hpctrain.comm.transports.setting import TransportSetting
    from hpctrain.host.mpi_library import MPI

CONNECT_SECONDS = 300
"""Time limit for the connection to the store."""

TIMEOUT = timedelta(days=365)
"""Time limit of an operation: none, since the watchdog ends and explains hangs."""


STREAMS = 32
"""Number of streams of one priority that torch has on a GPU. Process groups get them in turn."""

NATIVE_SUM_TYPES = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Types whose sums a process group always computes itself."""


class GroupStore:
    """Store in which the ranks of process groups find each other, and the process groups of this rank.

    Args:
        store: Connection of this rank to the store of rank 0.
        world_rank: This rank in the world of all processes.
    """

    def __init__(self, store: Store, world_rank: int) -> None:
        self._store, self._world_rank = store, world_rank
        self._numbers = count()
        self._connected: list[Any] = []
        self._unused: deque[Any] = deque()

    def of_group(self, communicator: MPI.Intracomm, name: str) -> tuple[Store, str]:
        """Return the part of the store that belongs to a new group, and the name with a unique suffix.

        Collective over the communicator. First, this rank ends its process groups that nobody uses any more.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._abort_unused()
        first = communicator.rank == 0
        suffix = communicator.bcast(f"{self._world_rank}.{next(self._numbers)}" if first else None)
        return PrefixStore(suffix, self._store), f"{name} {suffix}"

    def keep(self, group: Any, user: object) -> None:
        """Keep a process group connected as long as `user` exists. Local.

        The garbage collector may free `user` at any time, also while this rank is inside a call. So the
        group is ended later, by the next `of_group` or by `close`.
        """
        self._connected.append(group)
        if len(self._connected) == STREAMS + 1 and torch.accelerator.is_available():
            logging.getLogger("hpctrain").warning(
                "this rank has more than %d process groups, and torch has only that many streams for them: "
                "calls of different groups may wait for each other",
                STREAMS,
            )
        weakref.finalize(user, self._unused.append, group).atexit = False

    def close(self) -> None:
        """Disconnect all process groups, whose operations are complete. Collective over the world."""
        self._abort_unused()
        for group in self._connected:
            group.shutdown()
        self._connected.clear()

    def _abort_unused(self) -> None:
        if self._unused and torch.accelerator.is_available():
            torch.accelerator.synchronize()  # their last operations may still be on a stream
        while self._unused:
            group = self._unused.popleft()
            self._connected.remove(group)
            group.abort()


def open_store(communicator: MPI.Intracomm, nodes: int, world_rank: int) -> GroupStore:
    """Open a store on rank 0 and connect all ranks to it. Collective; its address travels by MPI.

    Args:
        communicator: Communicator of all ranks of a world.
        nodes: Number of nodes of the world. On one node, the ranks connect over the loopback interface.
        world_rank: This rank in the world of all processes.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=CONNECT_SECONDS)
    host = "127.0.0.1" if nodes == 1 else _node_address()
    store, port = None, 0
    try:
        if communicator.rank == 0:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        host, port = communicator.bcast(None if store is None else (host, store.port))
        if store is None:
            store = TCPStore(host, port, is_master=False, timeout=limit)
    except RuntimeError as error:
        raise CommunicationError(
            f"{socket.gethostname()} cannot connect to rank 0 at {host}, port {port} "
            f"({str(error).splitlines()[0]}): the transports nccl and gloo need TCP between all nodes"
        ) from error
    return GroupStore(store, world_rank)


def _node_address() -> str:
    """Return a name or an address of this node by which other nodes can connect to it.

    It is the host name. If that does not resolve to an address of a network, as in containers, it is the
    address from which this node sends to others.
    """
    name = socket.gethostname()
    with suppress(OSError):
        if not socket.gethostbyname(name).startswith("127."):
            return name
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation; a datagram socket sends nothing here
        return str(probe.getsockname()[0])
    return name


class ProcessGroupWork:
    """Handle of operations of a process group, which keeps their tensors alive.

    For NCCL, `wait` makes the stream that is current then wait for the operations, and not the host.

    Args:
        name: Name of the group, for messages of errors.
        works: torch's handles.
        tensors: Tensors that the operations read and write.
    """

    def __init__(self, name: str, works: Sequence[TorchWork], *tensors: Tensor) -> None:
        self._name, self._works, self._tensors = name, works, tensors

    def wait(self) -> None:
        """Wait until all operations are complete.

        Raises:
            CommunicationError: One of them has failed, such as after the end of another rank.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            raise CommunicationError(
                f"a call of the group {self._name} failed ({reason}); look for the first error of another "
                "rank, and check its GPU and its node"
            ) from error

    def test(self) -> bool:
        """Return True if all operations are complete, without waiting. Local.

        Raises:
            CommunicationError: One of them has failed.
        """
        if not all(work.is_completed() for work in self._works):
            return False
        self.wait()
        return True


class PieceMessage(NamedTuple):
    """Message of an exchange: True if this rank sends it, its memory as bytes, and the other rank."""

    sends: bool
    memory: Tensor
    peer: int


class ProcessGroupTransport(PairwiseTransport):
    """Transport whose collective operations are those of a process group of torch.

    The process group computes the sums of numbers of 32 and 64 bits, in the order of its own algorithm, which
    is the same in all runs with the same number of ranks and sizes. `reduction` does all other reductions, in
    rank order, since libraries lose NaN in maxima.

    Args:
        setting: Settings of the group of ranks.
        group: torch's process group, of type `torch.distributed.distributed_c10d.Backend`.
    """

    def __init__(self, setting: TransportSetting, group: Any) -> None:
        super().__init__(setting.communicator.rank, setting.communicator.size)
        self.name = setting.name
        setting.group_store.keep(group, self)
        self.sums_in_rank_order = self.size == 2
        self.scratch = setting.scratch
        self.group = group
        self._sum_types = NATIVE_SUM_TYPES | HALVES if setting.native_half_sums else NATIVE_SUM_TYPES

    @abstractmethod
    def start_messages(self, messages: Sequence[PieceMessage], tag: int) -> ProcessGroupWork:
        """Start the messages of an exchange in which all ranks take part. Collective; does not wait.

        Args:
            messages: Messages of this rank, at most one to and one from each rank. Receives come first.
            tag: Tag of `next_tag`, the same on all ranks.
        """

    def start_reduction(self, call: Call) -> TransportWork | None:
        """Reduce in rank order, or start that. Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        return run_steps(reduce_in_rank_order(self, call), call.blocking)

    def all_reduce(self, call: Call) -> TransportWork | None:
        """Reduce `call.tensor` in place on all ranks, or start that. Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation, as for `Transport.run`.
        """
        flat = flat_view(call.tensor)
        if not self._is_summed(call):
            return self.start_reduction(call)
        return self.finish(call.blocking, [self.group.allreduce([flat])] if len(flat) else [], flat)

    def reduce(self, call: Call) -> TransportWork | None:
        """Reduce `call.tensor` in place on the rank `call.root`, or start that. Collective.

        The tensors of other ranks do not change.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        from torch.distributed import ReduceOp

        flat = flat_view(call.tensor)
        if not self._is_summed(call):
            return self.start_reduction(call)
        memory = flat if self.rank == call.root else flat.clone()  # gloo adds in the memory of all ranks
        works = [self.group.reduce(memory, call.root, ReduceOp.SUM)] if len(flat) else []
        return self.finish(call.blocking, works, memory)

    def reduce_scatter(self, call: Call) -> TransportWork | None:
        """Reduce `call.tensor` and write this rank's elements into `call.output`, or start that. Collective.

        `call.output` may be this rank's elements of `call.tensor`, whose other elements do not change.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        flat, output = flat_view(call.tensor), flat_view(call.output)
        if not self._is_summed(call) or call.counts is not None:
            return self.start_reduction(call)
        works = [self.group._reduce_scatter_base(output, flat)] if len(flat) else []
        return self.finish(call.blocking, works, flat, output)

    def broadcast(self, call: Call) -> TransportWork | None:
        """Copy `call.tensor` of the rank `call.root` into `call.output` of every other rank, or start that.

        Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        memory = bytes_of(call.memory)
        works = [self.group.broadcast(memory, call.root)] if len(memory) else []
        return self.finish(call.blocking, works, memory)

    def all_gather(self, call: Call) -> TransportWork | None:
        """Gather the pieces `call.tensor` of all ranks into `call.output`, or start that. Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        if call.counts is not None:
            return self.move_pairwise(call)
        assert call.tensor is not None and call.output is not None
        return self.collect(call.tensor, call.output, call.blocking)

    def _is_summed(self, call: Call) -> bool:
        """Return True if the process group computes the reduction of a call."""
        return call.reduction == "sum" and call.dtype in self._sum_types

    gather = scatter = all_to_all = PairwiseTransport.move_pairwise

    def finish(self, blocking: bool, works: Sequence[TorchWork], *tensors: Tensor) -> ProcessGroupWork | None:
        """Return the handle of started operations; wait for blocking ones and return None.

        Args:
            blocking: True to wait.
            works: torch's handles; none if there is nothing to move.
            tensors: Tensors that the operations read and write.
        """
        work = ProcessGroupWork(self.name, works, *tensors)
        if not blocking:
            return work
        work.wait()
        return None

    # PieceMover

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> TransportWork | None:
        """Gather pieces of equal size from all ranks into `output`, in rank order. Collective.

        Returns:
            None if `blocking`; otherwise the handle, which keeps both tensors alive.
        """
        source, target = bytes_of(tensor), bytes_of(output)
        works = [self.group._allgather_base(target, source)] if len(target) else []
        return self.finish(blocking, works, source, target)

    @override
    def exchange(self, pieces: PieceExchange, tag: int) -> ProcessGroupWork:
        source, target = flat_view(pieces.source), flat_view(pieces.target)
        messages = [
            PieceMessage(False, bytes_of(target[begin : begin + length]), peer)
            for peer, (begin, length) in pieces.received_ranges(self.rank)
        ]
        messages += [
            PieceMessage(True, bytes_of(source[begin : begin + length]), peer)
            for peer, (begin, length) in pieces.sent_ranges(self.rank)
        ]
        pieces.copy_local_piece(self.rank)
        return self.start_messages(messages, tag)

    def share(
        self,
        tensor: Tensor,
        ranges: list[ElementRange],
        tag: int,
        blocking: bool,  # noqa: ARG002
    ) -> TransportWork | None:
        """Gather the ranges of `tensor` from their ranks, in place on all ranks. Collective.

        Args:
            tensor: Flat tensor.
            ranges: For each rank the range (first index, number of elements) of `tensor` that it has. They
                follow each other and cover the tensor, and are the same list on all ranks.
            tag: Tag of `next_tag`, the same on all ranks.
            blocking: Not used: the caller waits for the handle.

        Returns:
            Handle, which keeps the tensor alive. Never None.
        """
        return self.exchange(PieceExchange(tensor, [ranges[self.rank]] * self.size, tensor, ranges), tag)


def bytes_of(tensor: Tensor | None) -> Tensor:
    """Return a flat view of a contiguous tensor as bytes, since libraries do not know all types of torch."""
    return flat_view(tensor).view(torch.uint8)
