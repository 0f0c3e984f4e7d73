"""Transport over host memory by MPI through mpi4py.

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
from hpctrain.comm.transports import reduction as rank_order
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.transport import (
    ElementRange,
    Transport,
    TransportWork,
    offsets_of,
    pairwise_ranges,
    run_steps,
)
from hpctrain.host.mpi_library import MPI

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
NUMBERS: Mapping[Reduction, MPI.Op] = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
"""MPI operation of each reduction of numbers."""

TRUTHS: Mapping[Reduction, MPI.Op] = {"sum": MPI.BOR, "max": MPI.BOR, "min": MPI.BAND}
"""MPI operation of each reduction of bool tensors."""

SHORT = frozenset({torch.int8, torch.uint8, torch.int16, torch.uint16})
"""Integers whose sums MPI does not compute: torch lets them wrap, but Open MPI may saturate them."""

# Sizes up to which MPI's own sum of two ranks is faster than ours, which has the same bits.
BLOCKING_SUM_BYTES = 16 * 1024 * 1024
STARTED_SUM_BYTES = 512 * 1024
SCATTERED_SUM_BYTES = 64 * 1024
REDUCED_SUM_BYTES = 32 * 1024 * 1024

MESSAGE_LIMIT = 2**31 - 1
"""Largest number of elements of one MPI message."""

USER_TAGS = 2**14
"""Tags below are those of callers; the transport uses those from here to 2**15 - 1."""

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
        """Let the requests make progress. Return True if all are complete."""
        return bool(MPI.Request.Testall(self._requests))


def buffer_of(tensor: Tensor) -> Buffer:
    """Return the MPI buffer of a whole contiguous tensor."""
    return address(tensor.data_ptr(), tensor.nbytes), tensor.numel(), MPI_TYPES[tensor.dtype]


def flat_view(tensor: Tensor) -> Tensor:
    """Return a flat view of a contiguous tensor that autograd does not track."""
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def split_buffer(tensor: Tensor, counts: Sequence[int] | None, size: int) -> Buffer:
    """Return the MPI buffer of a contiguous tensor that consists of a piece for each rank.

    `counts` are the elements of each piece; None stands for pieces of equal size.
    """
    elements = tensor.numel() // size if counts is None else (counts, offsets_of(counts))
    return address(tensor.data_ptr(), tensor.nbytes), elements, MPI_TYPES[tensor.dtype]


class MpiTransport(Transport):
    """Transport for tensors in host memory over one MPI communicator.

    Args:
        communicator: Communicator of the group. Tags are divided between callers and this transport.
        scratch: Memory that reductions receive into.
        limit: Largest number of elements of one message (for tests).
    """

    def __init__(
        self, communicator: MPI.Intracomm, scratch: ReductionScratch, limit: int = MESSAGE_LIMIT
    ) -> None:
        self.communicator = communicator
        self.scratch = scratch
        self.rank = communicator.rank
        self.size = communicator.size
        self.limit = limit
        self._operations = 0

    def _messages(self, tensor: Tensor) -> list[Buffer]:
        """Return the buffers of a tensor, split into messages within the limit."""
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
    def run(self, call: Call) -> TransportWork | None:
        work: TransportWork | None = getattr(self, f"_{call.operation}")(call)
        return work

    @override
    def adds_at_owner(self, call: Call) -> bool:
        assert call.tensor is not None and call.reduction is not None
        most_bytes = BLOCKING_SUM_BYTES if call.blocking else STARTED_SUM_BYTES
        return (
            call.tensor.nbytes * self.size > rank_order.SMALL_BYTES
            and self._mpi_operation(call.tensor, call.reduction, most_bytes) is None
        )

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        return scratch_bytes(elements, itemsize, self.size, scattered)

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

    def _mpi_operation(self, tensor: Tensor, reduction: Reduction, most_bytes: int) -> MPI.Op | None:
        """Return the MPI operation if its result does not depend on the order, otherwise None.

        Args:
            tensor: Tensor that is reduced.
            reduction: "sum", "max" or "min".
            most_bytes: Size up to which MPI's own sum of two ranks is faster.
        """
        dtype = tensor.dtype
        if not dtype.is_floating_point:
            if reduction == "sum" and dtype in SHORT:
                return None
            return TRUTHS[reduction] if dtype == torch.bool else NUMBERS[reduction]
        if self.size == 2 and reduction == "sum" and tensor.itemsize >= 4 and tensor.nbytes <= most_bytes:
            return MPI.SUM
        return None

    def _all_reduce(self, call: Call) -> TransportWork | None:
        tensor, reduction, blocking = call.tensor, call.reduction, call.blocking
        assert tensor is not None and reduction is not None
        plain = self._mpi_operation(tensor, reduction, BLOCKING_SUM_BYTES if blocking else STARTED_SUM_BYTES)
        if plain is None:
            return run_steps(rank_order.all_reduce(self, flat_view(tensor), reduction, blocking), blocking)
        if blocking and tensor.numel() <= self.limit:  # `_issue` would cost noticeable time for small tensors
            self.communicator.Allreduce(MPI.IN_PLACE, buffer_of(tensor), plain)
            return None
        return self._issue(
            call, "Allreduce", *((MPI.IN_PLACE, part, plain) for part in self._messages(tensor))
        )

    def _reduce(self, call: Call) -> TransportWork | None:
        tensor, reduction, blocking, root = call.tensor, call.reduction, call.blocking, call.root
        assert tensor is not None and reduction is not None
        plain = self._mpi_operation(tensor, reduction, REDUCED_SUM_BYTES if blocking else STARTED_SUM_BYTES)
        if plain is None:
            return run_steps(rank_order.reduce(self, flat_view(tensor), root, reduction, blocking), blocking)
        parts = self._messages(tensor)
        if self.rank == root:
            return self._issue(call, "Reduce", *((MPI.IN_PLACE, part, plain, root) for part in parts))
        return self._issue(call, "Reduce", *((part, None, plain, root) for part in parts))

    def _reduce_scatter(self, call: Call) -> TransportWork | None:
        tensor, output, reduction, counts = call.tensor, call.output, call.reduction, call.counts
        assert tensor is not None and output is not None and reduction is not None
        plain = self._mpi_operation(tensor, reduction, SCATTERED_SUM_BYTES)
        if plain is None or tensor.numel() > self.limit or _overlap(output, tensor):
            steps = rank_order.reduce_scatter(
                self, flat_view(tensor), flat_view(output), counts, reduction, call.blocking
            )
            return run_steps(steps, call.blocking)
        if counts is not None:
            return self._issue(call, "Reduce_scatter", (buffer_of(tensor), buffer_of(output), counts, plain))
        source = split_buffer(tensor, None, self.size)
        return self._issue(call, "Reduce_scatter_block", (source, buffer_of(output), plain))

    # Movement

    def _broadcast(self, call: Call) -> TransportWork | None:
        assert call.memory is not None
        return self._issue(call, "Bcast", *((part, call.root) for part in self._messages(call.memory)))

    def _move_pieces(self, call: Call) -> TransportWork | None:
        """Gather the ranks' pieces into one tensor, or scatter them from one."""
        is_scatter = call.operation == "scatter"
        piece, pieces = (call.output, call.tensor) if is_scatter else (call.tensor, call.output)
        assert piece is not None
        if (piece.numel() * self.size if call.counts is None else sum(call.counts)) > self.limit:
            return self._move_pairwise(call)
        one = MPI.IN_PLACE if pieces is not None and _overlap(piece, pieces) else buffer_of(piece)
        many = None if pieces is None else split_buffer(pieces, call.counts, self.size)
        name = call.operation.replace("_", "").capitalize() + "v" * (call.counts is not None)
        root = () if call.operation == "all_gather" else (call.root,)
        return self._issue(call, name, (many, one, *root) if is_scatter else (one, many, *root))

    _all_gather = _gather = _scatter = _move_pieces

    def _all_to_all(self, call: Call) -> TransportWork | None:
        tensor, output = call.tensor, call.output
        assert tensor is not None and output is not None
        # Totals of uneven pieces differ between ranks, so that ranks could not agree on MPI's function.
        if call.counts is not None or tensor.numel() > self.limit:
            return self._move_pairwise(call)
        return self._issue(
            call, "Alltoall", (split_buffer(tensor, None, self.size), split_buffer(output, None, self.size))
        )

    def _send(self, call: Call) -> TransportWork | None:
        assert call.tensor is not None and 0 <= call.tag < USER_TAGS, call.tag
        return self._issue(
            call, "Send", *((part, call.peer, call.tag) for part in self._messages(call.tensor))
        )

    def _recv(self, call: Call) -> TransportWork | None:
        assert call.output is not None and 0 <= call.tag < USER_TAGS, call.tag
        return self._issue(
            call, "Recv", *((part, call.peer, call.tag) for part in self._messages(call.output))
        )

    def _barrier(self, call: Call) -> TransportWork | None:
        return self._issue(call, "Barrier", ())

    def _move_pairwise(self, call: Call) -> TransportWork | None:
        requests = self.exchange(*pairwise_ranges(call, self.size), self.next_tag())
        if not call.blocking:
            return requests
        requests.wait()
        return None

    # PieceMover

    def next_tag(self) -> int:
        """Return the message tag of the next operation, which is the same on all ranks."""
        self._operations += 1
        return USER_TAGS + self._operations % USER_TAGS

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> TransportWork | None:
        """Gather pieces of equal size from all ranks into `output`."""
        return self._move_pieces(Call("all_gather", tensor, output, blocking=blocking, start=0.0))

    def exchange(
        self,
        source: Tensor,
        sends: Sequence[ElementRange],
        target: Tensor,
        receives: Sequence[ElementRange],
        tag: int,
    ) -> MpiRequests:
        """Send one range of `source` to each rank, and receive one range of `target` from each rank.

        Each pair of ranks exchanges messages, so that ranks need not start their operations in one order.
        """
        requests = []
        for step in range(1, self.size):
            peer = (self.rank - step) % self.size
            requests += [
                self.communicator.Irecv(part, peer, tag)
                for part in self._range_messages(target, *receives[peer])
            ]
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            requests += [
                self.communicator.Isend(part, peer, tag)
                for part in self._range_messages(source, *sends[peer])
            ]
        (begin, count), (position, _) = sends[self.rank], receives[self.rank]
        if (
            count
            and target.data_ptr() + position * target.itemsize != source.data_ptr() + begin * source.itemsize
        ):
            flat_view(target)[position : position + count].copy_(flat_view(source)[begin : begin + count])
        return MpiRequests(requests, source, target)

    def share(
        self, tensor: Tensor, ranges: Sequence[ElementRange], tag: int, blocking: bool
    ) -> TransportWork | None:
        """Gather the consecutive ranges of `tensor` from their ranks, in place."""
        if blocking and tensor.numel() <= self.limit:
            counts = [count for _, count in ranges]
            self.communicator.Allgatherv(MPI.IN_PLACE, split_buffer(tensor, counts, self.size))
            return None
        return self.exchange(tensor, [ranges[self.rank]] * self.size, tensor, ranges, tag)


def scratch_bytes(elements: int, itemsize: int, size: int, scattered: bool = False) -> int:
    """Return the host memory, in bytes, that a started sum over `size` ranks takes and keeps.

    MPI's own sums need none. The other arguments are those of `Transport.scratch_bytes`.
    """
    most_bytes = SCATTERED_SUM_BYTES if scattered else STARTED_SUM_BYTES
    if size == 1 or (size == 2 and itemsize >= 4 and elements * itemsize <= most_bytes):
        return 0
    return rank_order.scratch_bytes(elements, itemsize, size)


def _overlap(piece: Tensor, tensor: Tensor) -> bool:
    """Return True if `piece` begins inside `tensor`; the same on all ranks, also for empty pieces."""
    if not piece.numel():
        return piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    begin = tensor.data_ptr()
    return begin <= piece.data_ptr() < begin + tensor.nbytes
