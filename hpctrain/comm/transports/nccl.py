"""The transport between GPUs: NCCL through nccl4py, whose unique ids travel over MPI.

Everything is ordered on streams and nothing waits on the host. A blocking call runs on the current
stream. A started one runs on a side stream of this transport, which first waits for the current stream;
waiting for it makes the then current stream wait for the side stream.

NCCL itself reduces integers, bool, and the sums of fp32 and fp64: those sums are in the order of NCCL's
algorithm, the same in every run of one layout and size. Half types and the maxima of floats (NCCL's
lose NaN) go through `reduction`.

NCCL knows no tags, and the operations of one of its communicators follow each other: a message that waits for
its peer would keep all others back. So started messages between neighbours of the ring of ranks have a
communicator and a stream for each direction of each pair. There they match in their order, and occupy the GPU
from when they are started: a receive is started when it is next to be needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.calls import Call, Operation
from hpctrain.comm.device import SideStream, current_stream
from hpctrain.comm.transports import reduction
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.transport import (
    ElementRange,
    Transport,
    TransportWork,
    pairwise_ranges,
    run_steps,
)

if TYPE_CHECKING:
    from hpctrain.host.mpi_library import MPI

NUMBERS: Mapping[Operation, str] = {"sum": "SUM", "max": "MAX", "min": "MIN"}
TRUTHS: Mapping[Operation, str] = {"sum": "MAX", "max": "MAX", "min": "MIN"}
SUMMED = frozenset({torch.float32, torch.float64})
INTEGERS = frozenset(
    {torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.bool}
)


class NcclChannel(NamedTuple):
    """A communicator of NCCL with the stream of what is started there, and this rank's peer in it."""

    communicator: Any
    stream: SideStream
    peer: int


class NcclTransport(Transport):
    """The primitives over one NCCL communicator, made at its first use, for tensors of one GPU a rank."""

    def __init__(self, communicator: MPI.Intracomm, scratch: ReductionScratch) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self.in_rank_order = self.size == 2
        self.scratch = scratch
        self._mpi = communicator
        self._communicator: Any = None
        self._core: Any = None
        self._side = SideStream()
        self._channels: dict[tuple[int, int], NcclChannel] = {}

    def _nccl(self) -> Any:
        """The NCCL communicator. At first use collective: rank 0's unique id goes to the others by MPI."""
        if self._communicator is None:
            from nccl import core

            self._core = core
            identity = self._mpi.bcast(core.get_unique_id() if self.rank == 0 else None)
            self._communicator = self._join(range(self.size), identity)
        return self._communicator

    def _join(self, ranks: Sequence[int], identity: Any) -> Any:
        """The communicator of these ranks, who all call this."""
        return self._core.Communicator.init(len(ranks), ranks.index(self.rank), identity)

    def _channel(self, sender: int, receiver: int, device: torch.device) -> NcclChannel:
        """That of started messages; of ranks that are no neighbours that of all. At first use collective."""
        everyone = NcclChannel(self._nccl(), self._side, receiver if sender == self.rank else sender)
        if not self._channels:
            neighbours = {(self.rank + 1) % self.size, (self.rank - 1) % self.size}
            own = {(self.rank, peer): self._core.get_unique_id() for peer in neighbours}
            known = {pair: identity for each in self._mpi.allgather(own) for pair, identity in each.items()}
            # In one order on all ranks, since each waits for its peer.
            for pair in sorted(known):
                if self.rank in pair:
                    communicator = self._join(pair, known[pair])
                    self._channels[pair] = NcclChannel(communicator, SideStream(), 1 - pair.index(self.rank))
                    # NCCL connects two ranks at their first message, for which it waits on the host.
                    first = torch.zeros(1, dtype=torch.uint8, device=device)
                    self._move(self._channels[pair], pair[0] == self.rank, first).wait()
        return self._channels.get((sender, receiver), everyone)

    def run(self, call: Call) -> TransportWork | None:
        """See Transport. Enqueues on the current stream, or on the side stream. Tags count for nothing; a
        Group's barrier is the host's.
        """
        operation, blocking = call.operation, call.blocking
        if operation in {"send", "recv"} and not blocking:
            return self._start(call)
        action = getattr(self, f"_{operation}")
        self._nccl()
        if blocking:
            self._side.precede()  # one communicator's operations follow each other
            action(call)
            return None
        return self._side.start(lambda: action(call), [call.tensor, call.output])

    def _start(self, call: Call) -> TransportWork:
        sends = call.operation == "send"
        assert call.memory is not None
        ends = (self.rank, call.peer) if sends else (call.peer, self.rank)
        return self._move(self._channel(*ends, call.memory.device), sends, call.memory)

    def _move(self, channel: NcclChannel, sends: bool, memory: Tensor) -> TransportWork:
        communicator, stream, peer = channel
        move = communicator.send if sends else communicator.recv
        flat = _bytes(memory)
        return stream.start(lambda: flat.numel() and move(flat, peer, stream=current_stream()), [memory])

    # Reductions

    def _operator(self, dtype: torch.dtype, operation: Operation) -> Any:
        """NCCL's operation, where it is used; else None."""
        if dtype in INTEGERS:
            return getattr(self._core.NcclRedOp, (TRUTHS if dtype == torch.bool else NUMBERS)[operation])
        return self._core.NcclRedOp.SUM if operation == "sum" and dtype in SUMMED else None

    def _all_reduce(self, call: Call) -> None:
        tensor, operation = call.tensor, call.reduced
        assert tensor is not None and operation is not None
        flat, operator = tensor.detach().view(-1), self._operator(tensor.dtype, operation)
        if operator is None:
            run_steps(reduction.all_reduce(self, flat, operation, True), True)
        elif flat.numel():
            self._nccl().allreduce(flat, flat, operator, stream=current_stream())

    def _reduce(self, call: Call) -> None:
        tensor, operation, root = call.tensor, call.reduced, call.root
        assert tensor is not None and operation is not None
        flat, operator = tensor.detach().view(-1), self._operator(tensor.dtype, operation)
        if operator is None:
            run_steps(reduction.reduce(self, flat, root, operation, True), True)
        elif flat.numel():
            target = flat if self.rank == root else None
            self._nccl().reduce(flat, target, operator, root, stream=current_stream())

    def _reduce_scatter(self, call: Call) -> None:
        tensor, output, operation, counts = call.tensor, call.output, call.reduced, call.counts
        assert tensor is not None and output is not None and operation is not None
        flat, mine = tensor.detach().view(-1), output.detach().view(-1)
        operator = self._operator(tensor.dtype, operation) if counts is None else None
        if operator is None:
            run_steps(reduction.reduce_scatter(self, flat, mine, counts, operation, True), True)
        elif flat.numel():
            self._nccl().reduce_scatter(flat, mine, operator, stream=current_stream())

    # Movement

    def _broadcast(self, call: Call) -> None:
        assert call.memory is not None
        if call.memory.numel():
            flat = _bytes(call.memory)
            self._nccl().broadcast(flat, flat, call.root, stream=current_stream())

    def _all_gather(self, call: Call) -> None:
        if call.counts is None:
            assert call.tensor is not None and call.output is not None
            self.collect(call.tensor, call.output, True)
        else:
            self._swap(call)

    def _swap(self, call: Call) -> None:
        self.exchange(*pairwise_ranges(call, self.size), 0)

    _gather = _scatter = _all_to_all = _swap

    def _send(self, call: Call) -> None:
        assert call.tensor is not None
        if call.tensor.numel():
            self._nccl().send(_bytes(call.tensor), call.peer, stream=current_stream())

    def _recv(self, call: Call) -> None:
        assert call.output is not None
        if call.output.numel():
            self._nccl().recv(_bytes(call.output), call.peer, stream=current_stream())

    # What reductions are made of: all of it is ordered on the stream, and nothing is pending

    def next_tag(self) -> int:
        """Return the message tag of the next operation, which is the same on all ranks."""
        return 0

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> TransportWork | None:  # noqa: ARG002
        """Gather pieces of equal size from all ranks."""
        if output.numel():
            self._nccl().allgather(_bytes(tensor), _bytes(output), stream=current_stream())
        return None

    def exchange(
        self,
        source: Tensor,
        sends: Sequence[ElementRange],
        target: Tensor,
        receives: Sequence[ElementRange],
        tag: int,  # noqa: ARG002
    ) -> TransportWork | None:
        """Send one span of `source` to each rank, and receive one span of `target` from each rank."""
        sent, received = source.detach().view(-1), target.detach().view(-1)
        (begin, count), (position, _) = sends[self.rank], receives[self.rank]
        own, there = sent[begin : begin + count], received[position : position + count]
        if count and own.data_ptr() != there.data_ptr():
            there.copy_(own)
        communicator, stream = self._nccl(), current_stream()
        with self._core.group():
            for peer in range(self.size):
                if peer == self.rank:
                    continue
                begin, count = sends[peer]
                if count:
                    communicator.send(_bytes(sent[begin : begin + count]), peer, stream=stream)
                begin, count = receives[peer]
                if count:
                    communicator.recv(_bytes(received[begin : begin + count]), peer, stream=stream)
        return None

    def share(
        self, tensor: Tensor, spans: Sequence[ElementRange], tag: int, blocking: bool
    ) -> TransportWork | None:
        """Gather the consecutive spans of `tensor` from all ranks, in place."""
        begin, count = spans[self.rank]
        if all(each[1] == count for each in spans):
            return self.collect(tensor[begin : begin + count], tensor, blocking)
        return self.exchange(tensor, [(begin, count)] * self.size, tensor, spans, tag)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: movement needs no type, and NCCL lacks some of torch's."""
    return tensor.detach().view(-1).view(torch.uint8)
