"""Transports by MPI through mpi4py: of tensors in host memory, and of GPU tensors by copies there.

MPI gets tensors as addresses, without a copy. Half types are sent as 16-bit integers, bool and fp8 as bytes.
MPI itself reduces where every order of addition has the same bits: integers, bool, and small sums of two
ranks in fp32 and fp64. `reduction` does everything else, also sums of short integers, which Open MPI would
saturate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call, Reduction
from hpctrain.comm.transports.reduction import (
    SMALL_BYTES,
    ReductionScratch,
    reduce_in_rank_order,
    reduction_scratch_bytes,
)
from hpctrain.comm.transports.transport import (
    USER_TAGS,
    ElementRange,
    PairwiseTransport,
    PieceExchange,
    Steps,
    Transport,
    TransportWork,
    offsets_of,
    run_steps,
)
from hpctrain.host.mpi_library import MPI
from hpctrain.host.streams import empty_host_tensor, synchronize_stream

MPI_TYPES: Mapping[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.float16: MPI.UINT16_T,
    torch.bfloat16: MPI.UINT16_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.bool: MPI.UINT8_T,
    torch.float8_e4m3fn: MPI.UINT8_T,
    torch.float8_e5m2: MPI.UINT8_T,
}
NUMBER_OPERATIONS: Mapping[Reduction, MPI.Op] = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
"""MPI operation of each reduction of numbers."""

BOOL_OPERATIONS: Mapping[Reduction, MPI.Op] = {"sum": MPI.BOR, "max": MPI.BOR, "min": MPI.BAND}
"""MPI operation of each reduction of bool tensors."""

SHORT_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.uint16})
"""Integers whose sums MPI does not compute: torch lets them wrap, but Open MPI may saturate them."""

SUM_BYTES: Mapping[str, tuple[int, int]] = {
    "all_reduce": (512 * 1024, 16 << 20),
    "reduce": (512 * 1024, 32 << 20),
    "reduce_scatter": (64 * 1024, 64 * 1024),
}
"""Sizes of started and of blocking sums up to which MPI adds two ranks faster than `reduction`.

The sums have the same bits.
"""

MESSAGE_LIMIT = 2**31 - 1
"""Largest number of elements of one MPI message."""

Buffer = tuple[MPI.buffer, int | tuple[Sequence[int], list[int]], MPI.Datatype]
address = MPI.buffer.fromaddress


class MpiRequests:
    """Handle of MPI requests, which keeps their tensors alive."""

    __slots__ = ("_requests", "_tensors")

    def __init__(self, requests: list[MPI.Request], *tensors: Tensor | None) -> None:
        self._requests = requests
        self._tensors = tensors

    def wait(self) -> None:
        """Wait until all requests are complete."""
        MPI.Request.Waitall(self._requests)

    def test(self) -> bool:
        """Let the requests make progress, without waiting. Return True if all are complete. Local."""
        return bool(MPI.Request.Testall(self._requests))


def buffer_of(tensor: Tensor) -> Buffer:
    """Return the MPI buffer of a whole contiguous tensor: (memory, number of elements, MPI type). Local.

    Nothing is copied, so the tensor must outlive the buffer. It has at most MESSAGE_LIMIT elements.
    """
    return address(tensor.data_ptr(), tensor.nbytes), tensor.numel(), MPI_TYPES[tensor.dtype]


def split_buffer(tensor: Tensor, counts: Sequence[int] | None, size: int) -> Buffer:
    """Return the MPI buffer of a contiguous tensor in host memory that has a piece for each rank. Local.

    Nothing is copied, so the tensor must outlive the buffer.

    Args:
        tensor: The pieces in rank order, one behind the other, at most MESSAGE_LIMIT elements together. This
            is not checked: callers move larger tensors by messages between pairs of ranks.
        counts: Number of elements of each rank's piece; None if all pieces have the same size.
        size: Number of ranks, used only if `counts` is None.
    """
    elements = tensor.numel() // size if counts is None else (counts, offsets_of(counts))
    return address(tensor.data_ptr(), tensor.nbytes), elements, MPI_TYPES[tensor.dtype]


class MpiTransport(PairwiseTransport):
    """Transport for tensors in host memory over one MPI communicator.

    Args:
        communicator: Communicator of the group. Tags are divided between callers and this transport.
        scratch: Memory that reductions receive into.
        limit: Largest number of elements of one message (for tests).
    """

    def __init__(
        self, communicator: MPI.Intracomm, scratch: ReductionScratch, limit: int = MESSAGE_LIMIT
    ) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator
        self.scratch = scratch
        self.limit = limit

    def _messages(self, tensor: Tensor | None) -> list[Buffer]:
        """Return the buffers of a tensor, which must not be None, split into messages within the limit."""
        assert tensor is not None
        count = tensor.numel()
        return [buffer_of(tensor)] if count <= self.limit else self._range_messages(tensor, 0, count)

    def _range_messages(self, tensor: Tensor, offset: int, count: int) -> list[Buffer]:
        """Return the buffers of a range of elements, split into messages within the limit."""
        itemsize, kind, limit = tensor.itemsize, MPI_TYPES[tensor.dtype], self.limit
        begin = tensor.data_ptr() + offset * itemsize
        parts: list[Buffer] = []
        while count > 0:
            length = min(count, limit)
            parts.append((address(begin, length * itemsize), length, kind))
            begin += length * itemsize
            count -= length
        return parts

    @override
    def adds_at_owner(self, call: Call) -> bool:
        assert call.tensor is not None
        is_large = call.tensor.nbytes * self.size > SMALL_BYTES
        return is_large and self._mpi_operation(call) is None

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        return mpi_scratch_bytes(elements, itemsize, self.size, scattered)

    def _issue(self, call: Call, name: str, *messages: Sequence[object]) -> TransportWork | None:
        """Call the MPI function `name`, or its non-blocking form, with the arguments of each message."""
        if call.blocking:
            function = getattr(self.communicator, name)
            for arguments in messages:
                function(*arguments)
            return None
        start = getattr(self.communicator, f"I{name.lower()}")
        return MpiRequests([start(*arguments) for arguments in messages], call.tensor, call.output)

    # Reductions

    def _mpi_operation(self, call: Call) -> MPI.Op | None:
        """Return the MPI operation if MPI reduces, otherwise None."""
        tensor, reduction = call.tensor, call.reduction
        assert tensor is not None and reduction is not None
        if not tensor.is_floating_point():
            if reduction == "sum" and tensor.dtype in SHORT_INTEGERS:
                return None
            return BOOL_OPERATIONS[reduction] if tensor.dtype == torch.bool else NUMBER_OPERATIONS[reduction]
        is_plain_sum = self.size == 2 and reduction == "sum" and tensor.itemsize >= 4
        return MPI.SUM if is_plain_sum and tensor.nbytes <= SUM_BYTES[call.operation][call.blocking] else None

    def _reduce_in_rank_order(self, call: Call) -> TransportWork | None:
        return run_steps(reduce_in_rank_order(self, call), call.blocking)

    def all_reduce(self, call: Call) -> TransportWork | None:
        """Reduce `call.tensor` in place on all ranks, or start that. Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation, as for `Transport.run`.
        """
        tensor, plain = call.tensor, self._mpi_operation(call)
        assert tensor is not None
        if plain is None:
            return self._reduce_in_rank_order(call)
        if call.blocking and tensor.numel() <= self.limit:  # `_issue` takes longer than a small reduction
            self.communicator.Allreduce(MPI.IN_PLACE, buffer_of(tensor), plain)
            return None
        messages = self._messages(tensor)
        return self._issue(call, "Allreduce", *((MPI.IN_PLACE, part, plain) for part in messages))

    def reduce(self, call: Call) -> TransportWork | None:
        """Reduce `call.tensor` in place on the rank `call.root`, or start that. Collective.

        The tensors of other ranks do not change.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        plain = self._mpi_operation(call)
        if plain is None:
            return self._reduce_in_rank_order(call)
        parts, options = self._messages(call.tensor), (plain, call.root)
        if self.rank == call.root:
            return self._issue(call, "Reduce", *((MPI.IN_PLACE, part, *options) for part in parts))
        return self._issue(call, "Reduce", *((part, None, *options) for part in parts))

    def reduce_scatter(self, call: Call) -> TransportWork | None:
        """Reduce `call.tensor` and write this rank's elements into `call.output`, or start that. Collective.

        `call.output` may be this rank's elements of `call.tensor`, whose other elements do not change.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        tensor, output, plain = call.tensor, call.output, self._mpi_operation(call)
        assert tensor is not None and output is not None
        if plain is None or tensor.numel() > self.limit or _overlap(output, tensor):
            return self._reduce_in_rank_order(call)
        if call.counts is not None:
            arguments = buffer_of(tensor), buffer_of(output), call.counts, plain
            return self._issue(call, "Reduce_scatter", arguments)
        source = split_buffer(tensor, None, self.size)
        return self._issue(call, "Reduce_scatter_block", (source, buffer_of(output), plain))

    # Movement

    def broadcast(self, call: Call) -> TransportWork | None:
        """Copy `call.tensor` of the rank `call.root` into `call.output` of every other rank, or start that.

        Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        return self._issue(call, "Bcast", *((part, call.root) for part in self._messages(call.memory)))

    def _move_pieces(self, call: Call) -> TransportWork | None:
        """Gather the ranks' pieces into one tensor, or scatter them from one. Collective."""
        is_scatter = call.operation == "scatter"
        piece, pieces = (call.output, call.tensor) if is_scatter else (call.tensor, call.output)
        assert piece is not None
        if (piece.numel() * self.size if call.counts is None else sum(call.counts)) > self.limit:
            return self.move_pairwise(call)
        one = MPI.IN_PLACE if pieces is not None and _overlap(piece, pieces) else buffer_of(piece)
        many = None if pieces is None else split_buffer(pieces, call.counts, self.size)
        name = call.operation.replace("_", "").capitalize() + "v" * (call.counts is not None)
        root = () if call.operation == "all_gather" else (call.root,)
        return self._issue(call, name, (many, one, *root) if is_scatter else (one, many, *root))

    all_gather = gather = scatter = _move_pieces

    def all_to_all(self, call: Call) -> TransportWork | None:
        """Send a piece of `call.tensor` to each rank, and fill `call.output` with one of each, or start that.

        Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        tensor, output = call.tensor, call.output
        assert tensor is not None and output is not None
        # Totals of uneven pieces differ between ranks, so that ranks could not agree on MPI's function.
        if call.counts is not None or tensor.numel() > self.limit:
            return self.move_pairwise(call)
        buffers = [split_buffer(each, None, self.size) for each in (tensor, output)]
        return self._issue(call, "Alltoall", buffers)

    def _message(self, call: Call) -> TransportWork | None:
        """Send or receive a message. Local."""
        assert 0 <= call.tag < USER_TAGS, call.tag
        messages = self._messages(call.memory)
        name = call.operation.capitalize()
        return self._issue(call, name, *((part, call.peer, call.tag) for part in messages))

    send = recv = _message

    def barrier(self, call: Call) -> TransportWork | None:
        """Wait until every rank has made the call, or start that. Collective.

        Returns:
            None if the call is blocking, otherwise a handle that is complete when every rank has made the
            call.
        """
        return self._issue(call, "Barrier", ())

    # PieceMover

    def start_message(self, tensor: Tensor, peer: int, tag: int, sends: bool) -> MpiRequests:
        """Start to send or to receive a contiguous tensor, and return its handle. Local; does not wait.

        Args:
            tensor: Tensor that is sent, or received into, which has as many elements and the same dtype on
                both ranks. Until the handle is complete, the one that is sent must not change, and the other
                one must be neither read nor changed.
            peer: Rank to or from which the message goes.
            tag: Tag that `next_tag` has returned on both ranks.
            sends: True if this rank sends, False if it receives.
        """
        start = self.communicator.Isend if sends else self.communicator.Irecv
        return MpiRequests([start(part, peer, tag) for part in self._messages(tensor)], tensor)

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> TransportWork | None:
        """Gather pieces of equal size from all ranks into `output`, in rank order. Collective.

        Returns:
            None if `blocking`; otherwise the handle, which keeps both tensors alive.
        """
        return self._move_pieces(Call("all_gather", tensor, output, blocking=blocking, start=0.0))

    @override
    def exchange(self, pieces: PieceExchange, tag: int) -> MpiRequests:
        source, target = pieces.source, pieces.target
        requests = [
            self.communicator.Irecv(part, peer, tag)
            for peer, of_peer in pieces.received_ranges(self.rank)
            for part in self._range_messages(target, *of_peer)
        ]
        requests += [
            self.communicator.Isend(part, peer, tag)
            for peer, of_peer in pieces.sent_ranges(self.rank)
            for part in self._range_messages(source, *of_peer)
        ]
        pieces.copy_local_piece(self.rank)
        return MpiRequests(requests, source, target)

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
            None if `blocking` and the tensor fits into one message: then it is complete. Otherwise the
            handle, for which the caller waits even if `blocking`.
        """
        if blocking and tensor.numel() <= self.limit:
            counts = [count for _, count in ranges]
            self.communicator.Allgatherv(MPI.IN_PLACE, split_buffer(tensor, counts, self.size))
            return None
        sends = [ranges[self.rank]] * self.size
        return self.exchange(PieceExchange(tensor, sends, tensor, ranges), tag)


class StagedTransport(Transport):
    """Transport of GPU tensors by copies in pinned host memory, which the transport `inner` moves.

    It serves ranks that share a GPU, and builds of torch without NCCL. MPI never sees device memory: a
    CUDA-aware MPI together with NCCL can deadlock. A call waits until its input is on the host. Results are
    copied back in the order of the current stream.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size

    @override
    def run(self, call: Call) -> TransportWork | None:
        """Run or start a call of a Group on GPU tensors. Collective, as the call.

        The host waits until the input is in host memory, even if the call is not blocking. The result is
        copied to the GPU by the current stream when the handle is complete, or before the return of a
        blocking call.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        return run_steps(self._steps(call), call.blocking)

    def _steps(self, call: Call) -> Steps:
        tensor, output = call.tensor, call.output
        source = target = None
        if tensor is not None:
            source = _empty_on_host(tensor).copy_(tensor.detach(), non_blocking=True)
            synchronize_stream(tensor.device)
        if output is not None:
            target = source if output is tensor else _empty_on_host(output)
        yield self.inner.run(call.with_memory(source, target))
        if output is not None and target is not None:
            output.detach().copy_(target, non_blocking=True)


def mpi_scratch_bytes(elements: int, itemsize: int, size: int, scattered: bool = False) -> int:
    """Return the host memory, in bytes, that a started sum of an MpiTransport takes on each rank and keeps.

    Local. Later sums use the same memory. A blocking sum takes as much, or none where MPI itself adds.

    Args:
        elements: Number of elements of each rank's input tensor.
        itemsize: Bytes per element. From 4 bytes on, fp32 or fp64 is assumed, below that a 16-bit float or a
            short integer. MPI itself adds larger integers and bool, without this memory.
        size: Number of ranks.
        scattered: True for a reduce-scatter, False for an all-reduce.

    Returns:
        The memory; 0 if MPI itself adds, or if the sum is so small that every rank receives all inputs.
    """
    most_bytes, _ = SUM_BYTES["reduce_scatter" if scattered else "all_reduce"]
    if size == 1 or (size == 2 and itemsize >= 4 and elements * itemsize <= most_bytes):
        return 0
    return reduction_scratch_bytes(elements, itemsize, size)


def _overlap(piece: Tensor, tensor: Tensor) -> bool:
    """Return True if `piece` begins inside `tensor`; the same on all ranks, also for empty pieces."""
    if not piece.numel():
        return piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    begin = tensor.data_ptr()
    return begin <= piece.data_ptr() < begin + tensor.nbytes


def _empty_on_host(tensor: Tensor) -> Tensor:
    return empty_host_tensor(tensor.shape, tensor.dtype, tensor.device)
