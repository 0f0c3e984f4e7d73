"""Transport among GPUs by NCCL through nccl4py; unique ids are exchanged over MPI.

All operations are ordered on streams, and the host never waits. A blocking call runs on the current stream.
Another one runs on a side stream, which first waits for the current stream. Waiting for the handle makes the
stream that is current then wait for the side stream.

NCCL itself reduces integers, bool, and sums of fp32 and fp64. These sums are in the order of NCCL's
algorithm, which is the same in all runs with the same layout and sizes. `reduction` does half types and
maxima of floats, in which NCCL loses NaN.

NCCL has no tags, and runs the operations of one communicator one after another. So a message whose peer is
not ready would delay all later operations. Therefore, started messages between ranks r and r + 1 (and between
the last rank and rank 0) have a communicator and a stream of their own for each pair and direction. On it,
sends and receives match in the order in which they are started. A started receive occupies the GPU until the
message arrives, so start it only shortly before its data is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call, Reduction
from hpctrain.comm.transports import reduction
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.transport import (
    ElementRange,
    PieceExchange,
    Transport,
    TransportWork,
    pairwise_ranges,
    run_steps,
)
from hpctrain.host.device import SideStream, current_stream

if TYPE_CHECKING:
    from hpctrain.host.mpi_library import MPI

NUMBER_OPERATIONS: Mapping[Reduction, str] = {"sum": "SUM", "max": "MAX", "min": "MIN"}
BOOL_OPERATIONS: Mapping[Reduction, str] = {"sum": "MAX", "max": "MAX", "min": "MIN"}
SUMMED_FLOATS = frozenset({torch.float32, torch.float64})
INTEGERS = frozenset(
    {torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.bool}
)


class NcclChannel(NamedTuple):
    """NCCL communicator, the stream of its started operations, and this rank's peer in it."""

    communicator: Any
    stream: SideStream
    peer: int


class NcclTransport(Transport):
    """Transport for tensors of one GPU per rank over a NCCL communicator, which is made at its first use.

    Args:
        communicator: MPI communicator of the group, for NCCL's unique ids.
        scratch: Allocator of temporary tensors of reductions. Those in GPU memory come from torch's own
            allocator.
    """

    def __init__(self, communicator: MPI.Intracomm, scratch: ReductionScratch) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self.sums_in_rank_order = self.size == 2
        self.scratch = scratch
        self._mpi = communicator
        self._communicator: Any = None
        self._core: Any = None
        self._side = SideStream()
        self._channels: dict[tuple[int, int], NcclChannel] = {}

    def _nccl(self) -> Any:
        """Return the NCCL communicator. The first call is collective: rank 0 sends its unique id by MPI."""
        if self._communicator is None:
            from nccl import core

            self._core = core
            identity = self._mpi.bcast(core.get_unique_id() if self.rank == 0 else None)
            self._communicator = self._join(range(self.size), identity)
        return self._communicator

    def _join(self, ranks: Sequence[int], identity: Any) -> Any:
        """Return a new communicator of these ranks. Collective over them."""
        return self._core.Communicator.init(len(ranks), ranks.index(self.rank), identity)

    def _channel(self, sender: int, receiver: int, device: torch.device) -> NcclChannel:
        """Return the channel of started messages between two ranks. The first call is collective.

        Ranks that are not next to each other in the ring use the communicator of all ranks.
        """
        channel_of_all = NcclChannel(self._nccl(), self._side, receiver if sender == self.rank else sender)
        if not self._channels:
            neighbors = {(self.rank + 1) % self.size, (self.rank - 1) % self.size}
            ids = {(self.rank, peer): self._core.get_unique_id() for peer in neighbors}
            identities = {
                pair: identity for each in self._mpi.allgather(ids) for pair, identity in each.items()
            }
            # All ranks use the same order, since each one waits for its peer.
            for pair in sorted(identities):
                if self.rank in pair:
                    communicator = self._join(pair, identities[pair])
                    self._channels[pair] = NcclChannel(communicator, SideStream(), 1 - pair.index(self.rank))
                    # NCCL connects two ranks at their first message, for which it waits on the host.
                    first = torch.zeros(1, dtype=torch.uint8, device=device)
                    self._move(self._channels[pair], pair[0] == self.rank, first).wait()
        return self._channels.get((sender, receiver), channel_of_all)

    @override
    def run(self, call: Call) -> TransportWork | None:
        """Run or start a call of a Group on GPU tensors. Collective over the group; the host does not wait.

        "send" and "recv" are local, except that the first call of a transport, and its first started message,
        make NCCL communicators, which is collective over all ranks of the group.

        Returns:
            None if the call is blocking: later work of the current stream can use the result. Otherwise the
            handle of the work on a side stream, whose `wait` makes the then current stream wait for it.
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

    def _operator(self, dtype: torch.dtype, kind: Reduction) -> Any:
        """Return NCCL's reduction if NCCL should reduce, otherwise None."""
        if dtype in INTEGERS:
            return getattr(
                self._core.NcclRedOp, (BOOL_OPERATIONS if dtype == torch.bool else NUMBER_OPERATIONS)[kind]
            )
        return self._core.NcclRedOp.SUM if kind == "sum" and dtype in SUMMED_FLOATS else None

    def _all_reduce(self, call: Call) -> None:
        tensor, kind = call.tensor, call.reduction
        assert tensor is not None and kind is not None
        flat, operator = tensor.detach().view(-1), self._operator(tensor.dtype, kind)
        if operator is None:
            run_steps(reduction.reduce_in_rank_order(self, call), True)
        elif flat.numel():
            self._nccl().allreduce(flat, flat, operator, stream=current_stream())

    def _reduce(self, call: Call) -> None:
        tensor, kind, root = call.tensor, call.reduction, call.root
        assert tensor is not None and kind is not None
        flat, operator = tensor.detach().view(-1), self._operator(tensor.dtype, kind)
        if operator is None:
            run_steps(reduction.reduce_in_rank_order(self, call), True)
        elif flat.numel():
            target = flat if self.rank == root else None
            self._nccl().reduce(flat, target, operator, root, stream=current_stream())

    def _reduce_scatter(self, call: Call) -> None:
        tensor, output, kind, counts = call.tensor, call.output, call.reduction, call.counts
        assert tensor is not None and output is not None and kind is not None
        flat, mine = tensor.detach().view(-1), output.detach().view(-1)
        operator = self._operator(tensor.dtype, kind) if counts is None else None
        if operator is None:
            run_steps(reduction.reduce_in_rank_order(self, call), True)
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
            self._move_pairwise(call)

    def _move_pairwise(self, call: Call) -> None:
        self.exchange(pairwise_ranges(call, self.size), 0)

    _gather = _scatter = _all_to_all = _move_pairwise

    def _send(self, call: Call) -> None:
        assert call.tensor is not None
        if call.tensor.numel():
            self._nccl().send(_bytes(call.tensor), call.peer, stream=current_stream())

    def _recv(self, call: Call) -> None:
        assert call.output is not None
        if call.output.numel():
            self._nccl().recv(_bytes(call.output), call.peer, stream=current_stream())

    # PieceMover: all operations are ordered on the stream, so there are no handles

    def next_tag(self) -> int:
        """Return 0: NCCL orders messages by the stream, and needs no tags."""
        return 0

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> TransportWork | None:  # noqa: ARG002
        """Queue a gather of pieces of equal size into `output` on the current stream. Collective.

        The result is always None, whatever `blocking` is, since later work of that stream can use `output`.
        The host does not wait.

        Args:
            tensor: Contiguous piece of this rank, of the same size on all ranks. It may be its place in
                `output`.
            output: Contiguous tensor of the same dtype for the pieces of all ranks, in rank order.
            blocking: Not used.
        """
        if output.numel():
            self._nccl().allgather(_bytes(tensor), _bytes(output), stream=current_stream())
        return None

    def exchange(self, pieces: PieceExchange, tag: int) -> TransportWork | None:  # noqa: ARG002
        """Queue the exchange of a piece with each rank on the current stream. Collective.

        The result is always None, since later work of that stream can use `pieces.target`. The host does not
        wait.

        Args:
            pieces: Contiguous tensors, and the range of each rank in them. Ranges may differ in length and be
                empty, but what one rank sends to another must be as long as what that rank receives. The
                piece that this rank keeps is copied, too, unless it is already in its place.
            tag: Not used.
        """
        source, sends, target, receives = pieces
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
        self, tensor: Tensor, ranges: list[ElementRange], tag: int, blocking: bool
    ) -> TransportWork | None:
        """Queue a gather of the ranges of `tensor`, in place, on the current stream. Collective.

        The result is always None, whatever `blocking` is, since later work of that stream can use `tensor`.
        The host does not wait.

        Args:
            tensor: Flat tensor.
            ranges: For each rank the range of `tensor` that it has; they follow each other.
            tag: Not used.
            blocking: Not used.
        """
        begin, count = ranges[self.rank]
        if all(each[1] == count for each in ranges):
            return self.collect(tensor[begin : begin + count], tensor, blocking)
        return self.exchange(PieceExchange(tensor, [(begin, count)] * self.size, tensor, ranges), tag)


def _bytes(tensor: Tensor) -> Tensor:
    """Return a flat view as bytes, since NCCL does not know all types of torch."""
    return tensor.detach().view(-1).view(torch.uint8)
