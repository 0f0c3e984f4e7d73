"""The transport over host memory: MPI through mpi4py.

Tensors reach MPI as addresses, without a copy. Half types travel as 16-bit integers, bool and fp8 as
bytes. Plain MPI reduces where every order gives the same bits: integers, bool, and small sums of two
ranks in fp32 and fp64; everything else goes through `reduction`, and so do the sums of short integers,
which Open MPI lets saturate. Blocking calls are MPI's blocking calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hpctrain.comm import reduction
from hpctrain.comm.library import MPI
from hpctrain.comm.reduction import Scratch
from hpctrain.comm.transport import Operation, Pending, Span, Transport, drive, spans_of, starts

TYPES: Mapping[torch.dtype, MPI.Datatype] = {
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
NUMBERS: Mapping[Operation, MPI.Op] = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
TRUTHS: Mapping[Operation, MPI.Op] = {"sum": MPI.BOR, "max": MPI.BOR, "min": MPI.BAND}

SHORT = frozenset({torch.int8, torch.uint8, torch.int16, torch.uint16})

# Up to these bytes MPI's own sum of two ranks is quicker than ours, which has the same bits.
BLOCKING_SUM_BYTES = 16 * 1024 * 1024
STARTED_SUM_BYTES = 512 * 1024
SCATTERED_SUM_BYTES = 64 * 1024
REDUCED_SUM_BYTES = 32 * 1024 * 1024

MESSAGE_LIMIT = 2**31 - 1
USER_TAGS = 2**14  # tags below are the callers', those from here to 2**15 - 1 the transport's own

Buffer = tuple[MPI.buffer, int, MPI.Datatype]
address = MPI.buffer.fromaddress


class Requests:
    """MPI requests under way, and the tensors that they use."""

    __slots__ = ("_requests", "_tensors")

    def __init__(self, requests: list[MPI.Request], *tensors: Tensor | None) -> None:
        self._requests = requests
        self._tensors = tensors

    def wait(self) -> None:
        """Return when all are complete."""
        MPI.Request.Waitall(self._requests)

    def test(self) -> bool:
        """Whether all are complete."""
        return bool(MPI.Request.Testall(self._requests))


def whole(tensor: Tensor) -> Buffer:
    """All of a contiguous tensor."""
    return address(tensor.data_ptr(), tensor.nbytes), tensor.numel(), TYPES[tensor.dtype]


def flat(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor, apart from autograd."""
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def even(tensor: Tensor, size: int) -> Buffer:
    """All of a contiguous tensor, as equal pieces: mpi4py wants the elements of one."""
    return address(tensor.data_ptr(), tensor.nbytes), tensor.numel() // size, TYPES[tensor.dtype]


def pieces(
    tensor: Tensor, counts: Sequence[int]
) -> tuple[MPI.buffer, tuple[Sequence[int], list[int]], MPI.Datatype]:
    """All of a contiguous tensor, as pieces of `counts` elements."""
    return address(tensor.data_ptr(), tensor.nbytes), (counts, starts(counts)), TYPES[tensor.dtype]


class MpiTransport(Transport):
    """The primitives over one MPI communicator, for tensors in host memory."""

    def __init__(self, communicator: MPI.Intracomm, scratch: Scratch, limit: int = MESSAGE_LIMIT) -> None:
        self.communicator = communicator
        self.scratch = scratch
        self.rank = communicator.rank
        self.size = communicator.size
        self.limit = limit
        self._operations = 0

    def _all(self, tensor: Tensor) -> list[Buffer]:
        """A whole tensor as messages within the limit."""
        count = tensor.numel()
        return [whole(tensor)] if count <= self.limit else self._parts(tensor, 0, count)

    def _parts(self, tensor: Tensor, offset: int, count: int) -> list[Buffer]:
        """A span of a tensor as messages within the limit."""
        itemsize, kind, limit = tensor.itemsize, TYPES[tensor.dtype], self.limit
        begin, parts = tensor.data_ptr() + offset * itemsize, []
        while count > 0:
            length = min(count, limit)
            parts.append((address(begin, length * itemsize), length, kind))
            begin += length * itemsize
            count -= length
        return parts

    # Reductions

    def _plain(self, tensor: Tensor, operation: Operation, quick: int) -> MPI.Op | None:
        """MPI's own operation, where its result does not depend on the order; sums up to `quick` bytes."""
        dtype = tensor.dtype
        if not dtype.is_floating_point:
            if operation == "sum" and dtype in SHORT:
                return None
            return TRUTHS[operation] if dtype == torch.bool else NUMBERS[operation]
        if self.size == 2 and operation == "sum" and tensor.itemsize >= 4 and tensor.nbytes <= quick:
            return MPI.SUM
        return None

    def all_reduce(self, tensor: Tensor, operation: Operation, blocking: bool) -> Pending | None:
        """See Transport."""
        plain = self._plain(tensor, operation, BLOCKING_SUM_BYTES if blocking else STARTED_SUM_BYTES)
        if plain is None:
            return drive(reduction.all_reduce(self, flat(tensor), operation, blocking), blocking)
        parts = self._all(tensor)
        if blocking:
            for part in parts:
                self.communicator.Allreduce(MPI.IN_PLACE, part, plain)
            return None
        return Requests([self.communicator.Iallreduce(MPI.IN_PLACE, part, plain) for part in parts], tensor)

    def reduce(self, tensor: Tensor, root: int, operation: Operation, blocking: bool) -> Pending | None:
        """See Transport."""
        plain = self._plain(tensor, operation, REDUCED_SUM_BYTES if blocking else STARTED_SUM_BYTES)
        if plain is None:
            steps = reduction.reduce(self, flat(tensor), root, operation, blocking)
            return drive(steps, blocking)
        requests = []
        for part in self._all(tensor):
            source, target = (MPI.IN_PLACE, part) if self.rank == root else (part, None)
            if blocking:
                self.communicator.Reduce(source, target, plain, root)
            else:
                requests.append(self.communicator.Ireduce(source, target, plain, root))
        return None if blocking else Requests(requests, tensor)

    def reduce_scatter(
        self,
        tensor: Tensor,
        output: Tensor,
        counts: Sequence[int] | None,
        operation: Operation,
        blocking: bool,
    ) -> Pending | None:
        """See Transport."""
        plain = self._plain(tensor, operation, SCATTERED_SUM_BYTES)
        if plain is None or tensor.numel() > self.limit or _overlap(output, tensor):
            steps = reduction.reduce_scatter(self, flat(tensor), flat(output), counts, operation, blocking)
            return drive(steps, blocking)
        comm, target = self.communicator, whole(output)
        if counts is None:
            source = even(tensor, self.size)
            if blocking:
                comm.Reduce_scatter_block(source, target, plain)
                return None
            return Requests([comm.Ireduce_scatter_block(source, target, plain)], tensor, output)
        source = whole(tensor)
        if blocking:
            comm.Reduce_scatter(source, target, counts, plain)
            return None
        return Requests([comm.Ireduce_scatter(source, target, counts, plain)], tensor, output)

    # Movement

    def broadcast(self, tensor: Tensor, root: int, blocking: bool) -> Pending | None:
        """See Transport."""
        parts = self._all(tensor)
        if blocking:
            for part in parts:
                self.communicator.Bcast(part, root)
            return None
        return Requests([self.communicator.Ibcast(part, root) for part in parts], tensor)

    def all_gather(
        self, tensor: Tensor, output: Tensor, counts: Sequence[int] | None, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        comm = self.communicator
        if output.numel() > self.limit:
            sends, receives = [(0, tensor.numel())] * self.size, spans_of(counts, output, self.size)
            return self._exchange(tensor, sends, output, receives, blocking)
        source = MPI.IN_PLACE if _overlap(tensor, output) else whole(tensor)
        if counts is None:
            target = even(output, self.size)
            if blocking:
                comm.Allgather(source, target)
                return None
            return Requests([comm.Iallgather(source, target)], tensor, output)
        varied = pieces(output, counts)
        if blocking:
            comm.Allgatherv(source, varied)
            return None
        return Requests([comm.Iallgatherv(source, varied)], tensor, output)

    def gather(
        self, tensor: Tensor, output: Tensor | None, counts: Sequence[int] | None, root: int, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        comm = self.communicator
        if self._beyond(tensor, counts):
            sends = _only(root, (0, tensor.numel()), self.size)
            receives = _none(self.size) if output is None else spans_of(counts, output, self.size)
            return self._exchange(tensor, sends, tensor if output is None else output, receives, blocking)
        source = MPI.IN_PLACE if output is not None and _overlap(tensor, output) else whole(tensor)
        if counts is None:
            target = None if output is None else even(output, self.size)
            if blocking:
                comm.Gather(source, target, root)
                return None
            return Requests([comm.Igather(source, target, root)], tensor, output)
        varied = None if output is None else pieces(output, counts)
        if blocking:
            comm.Gatherv(source, varied, root)
            return None
        return Requests([comm.Igatherv(source, varied, root)], tensor, output)

    def scatter(
        self, tensor: Tensor | None, output: Tensor, counts: Sequence[int] | None, root: int, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        comm = self.communicator
        if self._beyond(output, counts):
            receives = _only(root, (0, output.numel()), self.size)
            sends = _none(self.size) if tensor is None else spans_of(counts, tensor, self.size)
            return self._exchange(output if tensor is None else tensor, sends, output, receives, blocking)
        target = MPI.IN_PLACE if tensor is not None and _overlap(output, tensor) else whole(output)
        if counts is None:
            source = None if tensor is None else even(tensor, self.size)
            if blocking:
                comm.Scatter(source, target, root)
                return None
            return Requests([comm.Iscatter(source, target, root)], tensor, output)
        varied = None if tensor is None else pieces(tensor, counts)
        if blocking:
            comm.Scatterv(varied, target, root)
            return None
        return Requests([comm.Iscatterv(varied, target, root)], tensor, output)

    def all_to_all(
        self,
        tensor: Tensor,
        output: Tensor,
        send_counts: Sequence[int] | None,
        receive_counts: Sequence[int] | None,
        blocking: bool,
    ) -> Pending | None:
        """See Transport."""
        # The totals of uneven pieces differ from rank to rank, and with them whether a rank could use
        # MPI's own: they always go in pairs.
        if send_counts is None and tensor.numel() <= self.limit:
            source, target = even(tensor, self.size), even(output, self.size)
            if blocking:
                self.communicator.Alltoall(source, target)
                return None
            return Requests([self.communicator.Ialltoall(source, target)], tensor, output)
        sends, receives = (
            spans_of(send_counts, tensor, self.size),
            spans_of(receive_counts, output, self.size),
        )
        return self._exchange(tensor, sends, output, receives, blocking)

    def send(self, tensor: Tensor, destination: int, tag: int, blocking: bool) -> Pending | None:
        """See Transport."""
        assert 0 <= tag < USER_TAGS, tag
        parts = self._all(tensor)
        if blocking:
            for part in parts:
                self.communicator.Send(part, destination, tag)
            return None
        return Requests([self.communicator.Isend(part, destination, tag) for part in parts], tensor)

    def recv(self, tensor: Tensor, source: int, tag: int, blocking: bool) -> Pending | None:
        """See Transport."""
        assert 0 <= tag < USER_TAGS, tag
        parts = self._all(tensor)
        if blocking:
            for part in parts:
                self.communicator.Recv(part, source, tag)
            return None
        return Requests([self.communicator.Irecv(part, source, tag) for part in parts], tensor)

    def barrier(self, blocking: bool) -> Pending | None:
        """See Transport."""
        if blocking:
            self.communicator.Barrier()
            return None
        return Requests([self.communicator.Ibarrier()])

    # What reductions are made of

    def next_tag(self) -> int:
        """See Mover."""
        self._operations += 1
        return USER_TAGS + self._operations % USER_TAGS

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> Pending | None:
        """See Mover."""
        return self.all_gather(tensor, output, None, blocking)

    def exchange(
        self, source: Tensor, sends: Sequence[Span], target: Tensor, receives: Sequence[Span], tag: int
    ) -> Requests:
        """See Mover. Messages between pairs, so that ranks need not start their operations in one order."""
        requests = []
        for step in range(1, self.size):
            peer = (self.rank - step) % self.size
            requests += [
                self.communicator.Irecv(part, peer, tag) for part in self._parts(target, *receives[peer])
            ]
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            requests += [
                self.communicator.Isend(part, peer, tag) for part in self._parts(source, *sends[peer])
            ]
        (begin, count), (place, _) = sends[self.rank], receives[self.rank]
        if (
            count
            and target.data_ptr() + place * target.itemsize != source.data_ptr() + begin * source.itemsize
        ):
            flat(target)[place : place + count].copy_(flat(source)[begin : begin + count])
        return Requests(requests, source, target)

    def _exchange(
        self, source: Tensor, sends: Sequence[Span], target: Tensor, receives: Sequence[Span], blocking: bool
    ) -> Pending | None:
        requests = self.exchange(source, sends, target, receives, self.next_tag())
        if not blocking:
            return requests
        requests.wait()
        return None

    def _beyond(self, part: Tensor, counts: Sequence[int] | None) -> bool:
        """Whether all ranks' parts together are beyond the limit of one message."""
        return (part.numel() * self.size if counts is None else sum(counts)) > self.limit

    def share(self, tensor: Tensor, spans: Sequence[Span], tag: int, blocking: bool) -> Pending | None:
        """See Mover."""
        if blocking and tensor.numel() <= self.limit:
            counts = [count for _, count in spans]
            self.communicator.Allgatherv(MPI.IN_PLACE, pieces(tensor, counts))
            return None
        return self.exchange(tensor, [spans[self.rank]] * self.size, tensor, spans, tag)


def _none(size: int) -> list[Span]:
    return [(0, 0)] * size


def _only(rank: int, span: Span, size: int) -> list[Span]:
    spans = _none(size)
    spans[rank] = span
    return spans


def _overlap(piece: Tensor, tensor: Tensor) -> bool:
    """Whether `piece` begins inside the memory of `tensor`, as a rank's own place does."""
    begin = tensor.data_ptr()
    return begin <= piece.data_ptr() < begin + tensor.nbytes
