"""Transport over a process group of torch: gloo, for tensors in CPU memory.

MPI brings the ranks of a process group together. Rank 0 of the world opens one store, whose address travels
by MPI. Each group has its own prefix in the store, which its rank 0 chooses and sends by MPI. Process groups
are made with their Group and connect all its ranks at once, never at a first message.

gloo adds numbers of 32 and 64 bits itself, in the order of its own algorithm, which is the same in all runs
with the same number of ranks and sizes. `reduction` does all other reductions, and reduce-scatters, in rank
order. gloo's threads carry out all operations, also while this rank computes.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.mpi import USER_TAGS
from hpctrain.comm.transports.reduction import ReductionScratch, reduce_in_rank_order
from hpctrain.comm.transports.transport import (
    ElementRange,
    PieceExchange,
    Transport,
    TransportWork,
    flat_view,
    pairwise_ranges,
    run_steps,
)

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed import Work as TorchWork

    from hpctrain.host.mpi_library import MPI

SUMMED = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Types whose sums gloo computes. It loses NaN in maxima, and rounds sums of 16-bit floats at each step."""

CONNECT_SECONDS = 300
"""Time limit for the connection to the store."""

TIMEOUT = timedelta(days=365)
"""Time limit of an operation: none, since the watchdog ends and explains hangs."""


class GroupStore(NamedTuple):
    """Store of a world in which the ranks of a process group find each other.

    Attributes:
        store: Connection of this rank to the store of rank 0.
        numbers: Numbers that this rank has not used yet in the prefix of a group.
        world_rank: This rank in the world of all processes.
    """

    store: Store
    numbers: count[int]
    world_rank: int

    def of_group(self, communicator: MPI.Intracomm) -> Store:
        """Return the part of the store that belongs to a new group. Collective over its communicator."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        first = communicator.rank == 0
        prefix = communicator.bcast(f"{self.world_rank}.{next(self.numbers)}" if first else None)
        return PrefixStore(prefix, self.store)


def open_store(communicator: MPI.Intracomm, nodes: int, world_rank: int) -> GroupStore:
    """Open a store on rank 0 and connect all ranks to it. Collective; its address travels by MPI.

    Args:
        communicator: Communicator of all ranks of a world.
        nodes: Number of nodes of the world. On one node, the ranks connect over the loopback interface.
        world_rank: This rank in the world of all processes.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=CONNECT_SECONDS)
    host = "127.0.0.1" if nodes == 1 else socket.gethostname()
    store = None
    if communicator.rank == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
    host, port = communicator.bcast(None if store is None else (host, store.port))
    if store is None:
        store = TCPStore(host, port, is_master=False, timeout=limit)
    return GroupStore(store, count(), world_rank)


class ProcessGroupWork:
    """Handle of operations of a process group, which keeps their tensors alive.

    gloo tells that a message is complete only to a thread that waits for it. So the first `test` of messages
    starts a thread.

    Args:
        works: torch's handles.
        tensors: Tensors that the operations read and write.
        messages: True if the operations are sends and receives.
    """

    __slots__ = ("_complete", "_error", "_messages", "_tensors", "_waits", "_works")

    def __init__(self, works: Sequence[TorchWork], *tensors: Tensor, messages: bool = False) -> None:
        self._works, self._tensors, self._messages = works, tensors, messages
        self._complete = Event()
        self._waits = False
        self._error: Exception | None = None

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._complete.set()

    def wait(self) -> None:
        """Wait until all operations are complete.

        Raises:
            RuntimeError: One of them has failed, such as after the end of another rank.
        """
        if self._waits:
            self._complete.wait()
        else:
            self._waits = True
            self._wait()
        if self._error is not None:
            raise self._error

    def test(self) -> bool:
        """Return True if all operations are complete, without waiting. Local.

        Raises:
            RuntimeError: One of them has failed.
        """
        if self._messages and not self._waits:
            self._waits = True
            Thread(target=self._wait, name="gloo", daemon=True).start()
        if not (self._complete.is_set() if self._waits else all(work.is_completed() for work in self._works)):
            return False
        self.wait()
        return True


class GlooTransport(Transport):
    """Transport for tensors in CPU memory over torch's ProcessGroupGloo. The constructor is collective.

    Args:
        communicator: MPI communicator of the group.
        scratch: Memory that reductions in rank order receive into.
        store: Store of the world.
    """

    def __init__(self, communicator: MPI.Intracomm, scratch: ReductionScratch, store: GroupStore) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.sums_in_rank_order = self.size == 2
        self.scratch = scratch
        self._operations = 0
        if self.size > 1:
            from torch.distributed import ProcessGroupGloo

            # torch's type stubs lack most methods.
            self._gloo: Any = ProcessGroupGloo(store.of_group(communicator), self.rank, self.size, TIMEOUT)

    # Reductions

    def all_reduce(self, call: Call) -> TransportWork | None:
        """Reduce `call.tensor` in place on all ranks, or start that. Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation, as for `Transport.run`.
        """
        flat = flat_view(call.tensor)
        if call.reduction != "sum" or flat.dtype not in SUMMED:
            return self._reduce_in_rank_order(call)
        return self._complete(call, self._gloo.allreduce([flat]) if len(flat) else None, flat)

    def reduce(self, call: Call) -> TransportWork | None:
        """Reduce `call.tensor` in place on the rank `call.root`, or start that. Collective.

        The tensors of other ranks do not change.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        from torch.distributed import ReduceOp

        flat = flat_view(call.tensor)
        if call.reduction != "sum" or flat.dtype not in SUMMED:
            return self._reduce_in_rank_order(call)
        own = flat if self.rank == call.root else flat.clone()  # gloo adds in the memory of all ranks
        work = self._gloo.reduce(own, call.root, ReduceOp.SUM) if len(flat) else None
        return self._complete(call, work, own)

    def _reduce_in_rank_order(self, call: Call) -> TransportWork | None:
        return run_steps(reduce_in_rank_order(self, call), call.blocking)

    reduce_scatter = _reduce_in_rank_order

    # Movement

    def broadcast(self, call: Call) -> TransportWork | None:
        """Copy `call.tensor` of the rank `call.root` into `call.output` of every other rank, or start that.

        Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        memory = _bytes(call.memory)
        return self._complete(call, self._gloo.broadcast(memory, call.root) if len(memory) else None, memory)

    def all_gather(self, call: Call) -> TransportWork | None:
        """Gather the pieces `call.tensor` of all ranks into `call.output`, or start that. Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        if call.counts is not None:
            return self._move_pairwise(call)
        assert call.tensor is not None and call.output is not None
        return self.collect(call.tensor, call.output, call.blocking)

    def _move_pairwise(self, call: Call) -> TransportWork | None:
        work = self.exchange(pairwise_ranges(call, self.size), self.next_tag())
        return _finish(work, call.blocking)

    gather = scatter = all_to_all = _move_pairwise

    def send(self, call: Call) -> TransportWork | None:
        """Send `call.tensor` to the rank `call.peer`, or start that. Local.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        memory = _bytes(call.tensor)
        return self._complete(call, self._gloo.send([memory], call.peer, call.tag), memory, messages=True)

    def recv(self, call: Call) -> TransportWork | None:
        """Receive a message of the rank `call.peer` into `call.output`, or start that. Local.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        memory = _bytes(call.output)
        return self._complete(call, self._gloo.recv([memory], call.peer, call.tag), memory, messages=True)

    def barrier(self, call: Call) -> TransportWork | None:
        """Wait until every rank has made the call, or start that. Collective.

        Returns:
            None if the call is blocking, otherwise a handle that is complete when every rank has made the
            call.
        """
        return self._complete(call, self._gloo.barrier())

    def _complete(
        self, call: Call, work: TorchWork | None, *tensors: Tensor, messages: bool = False
    ) -> TransportWork | None:
        """Wait for an operation if the call is blocking, otherwise return its handle."""
        handle = ProcessGroupWork([] if work is None else [work], *tensors, messages=messages)
        return _finish(handle, call.blocking)

    # PieceMover

    def next_tag(self) -> int:
        """Return a message tag for the `exchange` and `share` of one operation. Local: nothing is sent.

        Each call counts further, from USER_TAGS to 2 USER_TAGS - 1 and around. All ranks call it once per
        operation, in the same order, so that they get the same tag.
        """
        self._operations += 1
        return USER_TAGS + self._operations % USER_TAGS

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> TransportWork | None:
        """Gather pieces of equal size from all ranks into `output`, in rank order. Collective.

        Returns:
            None if `blocking`; otherwise the handle, which keeps both tensors alive.
        """
        work = self._gloo._allgather_base(_bytes(output), _bytes(tensor)) if output.numel() else None
        handle = ProcessGroupWork([] if work is None else [work], tensor, output)
        return _finish(handle, blocking)

    def exchange(self, pieces: PieceExchange, tag: int) -> ProcessGroupWork:
        """Start to send a piece to each rank, and to receive a piece from each rank.

        Collective; does not wait. Each pair of ranks exchanges messages, so that ranks need not start their
        operations in one order. The piece that this rank keeps is copied at once.

        Args:
            pieces: Tensors, and the ranges for each rank.
            tag: Tag of `next_tag`, the same on all ranks.

        Returns:
            Handle, which keeps both tensors alive. Never None.
        """
        source, target = flat_view(pieces.source), flat_view(pieces.target)
        works = []
        for step in range(1, self.size):
            peer = (self.rank - step) % self.size
            begin, length = pieces.receives[peer]
            if length:
                works.append(self._gloo.recv([_bytes(target[begin : begin + length])], peer, tag))
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            begin, length = pieces.sends[peer]
            if length:
                works.append(self._gloo.send([_bytes(source[begin : begin + length])], peer, tag))
        (begin, length), (position, _) = pieces.sends[self.rank], pieces.receives[self.rank]
        own, kept = source[begin : begin + length], target[position : position + length]
        if length and own.data_ptr() != kept.data_ptr():
            kept.copy_(own)
        return ProcessGroupWork(works, source, target, messages=True)

    def share(
        self, tensor: Tensor, ranges: list[ElementRange], tag: int, blocking: bool
    ) -> TransportWork | None:
        """Gather the ranges of `tensor` from their ranks, in place on all ranks. Collective.

        Args:
            tensor: Flat tensor.
            ranges: For each rank the range (first index, number of elements) of `tensor` that it has. They
                follow each other and cover the tensor, and are the same list on all ranks.
            tag: Tag of `next_tag`, the same on all ranks.
            blocking: True if the caller waits at once.

        Returns:
            None if `blocking`; otherwise the handle, which keeps the tensor alive.
        """
        sends = [ranges[self.rank]] * self.size
        work = self.exchange(PieceExchange(tensor, sends, tensor, ranges), tag)
        return _finish(work, blocking)


def _finish(work: ProcessGroupWork, blocking: bool) -> ProcessGroupWork | None:
    """Return the handle of a started operation; of a blocking one, wait for it and return None."""
    if not blocking:
        return work
    work.wait()
    return None


def _bytes(tensor: Tensor | None) -> Tensor:
    """Return a flat view as bytes, since gloo does not know all types of torch."""
    return flat_view(tensor).view(torch.uint8)
