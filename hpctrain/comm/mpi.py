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
from hpctrain.comm.reduction import Scratch, Span
from hpctrain.comm.transport import Operation, Pending, Transport, drive, equal, starts

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
BLOCKING_SUM_BYTES = 2 * 1024 * 1024
STARTED_SUM_BYTES = 512 * 1024
SCATTERED_SUM_BYTES = 128 * 1024

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
        parts = [whole(tensor)] if tensor.numel() <= self.limit else self._parts(tensor, 0, tensor.numel())
        if blocking:
            for part in parts:
                self.communicator.Allreduce(MPI.IN_PLACE, part, plain)
            return None
        return Requests([self.communicator.Iallreduce(MPI.IN_PLACE, part, plain) for part in parts], tensor)

    def reduce(self, tensor: Tensor, root: int, operation: Operation, blocking: bool) -> Pending | None:
        """See Transport."""
        plain = self._plain(tensor, operation, BLOCKING_SUM_BYTES if blocking else STARTED_SUM_BYTES)
        if plain is None:
            steps = reduction.reduce(self, flat(tensor), root, operation, blocking)
            return drive(steps, blocking)
        requests = []
        for part in self._parts(tensor, 0, tensor.numel()):
            source, target = (MPI.IN_PLACE, part) if self.rank == root else (part, None)
            if blocking:
                self.communicator.Reduce(source, target, plain, root)
            else:
                requests.append(self.communicator.Ireduce(source, target, plain, root))
        return None if blocking else Requests(requests, tensor)

    def reduce_scatter(
        self, tensor: Tensor, output: Tensor, counts: Sequence[int], operation: Operation, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        plain = self._plain(tensor, operation, SCATTERED_SUM_BYTES)
        if plain is not None and tensor.numel() <= self.limit and not _overlap(output, tensor):
            source, target = whole(tensor), whole(output)
            if blocking:
                self.communicator.Reduce_scatter(source, target, counts, plain)
                return None
            request = self.communicator.Ireduce_scatter(source, target, counts, plain)
            return Requests([request], tensor, output)
        steps = reduction.reduce_scatter(self, flat(tensor), flat(output), counts, operation, blocking)
        return drive(steps, blocking)

    # Movement

    def broadcast(self, tensor: Tensor, root: int, blocking: bool) -> Pending | None:
        """See Transport."""
        parts = [whole(tensor)] if tensor.numel() <= self.limit else self._parts(tensor, 0, tensor.numel())
        if blocking:
            for part in parts:
                self.communicator.Bcast(part, root)
            return None
        return Requests([self.communicator.Ibcast(part, root) for part in parts], tensor)

    def all_gather(
        self, tensor: Tensor, output: Tensor, counts: Sequence[int], blocking: bool
    ) -> Pending | None:
        """See Transport."""
        if output.numel() > self.limit:
            sends = [(0, tensor.numel())] * self.size
            return self._exchange(tensor, sends, output, _spans(counts), self.next_tag(), blocking)
        source = MPI.IN_PLACE if _overlap(tensor, output) else whole(tensor)
        if equal(counts):
            # With an explicit count mpi4py wants the elements of one rank.
            target = (address(output.data_ptr(), output.nbytes), counts[0], TYPES[output.dtype])
            if blocking:
                self.communicator.Allgather(source, target)
                return None
            return Requests([self.communicator.Iallgather(source, target)], tensor, output)
        varied = pieces(output, counts)
        if blocking:
            self.communicator.Allgatherv(source, varied)
            return None
        return Requests([self.communicator.Iallgatherv(source, varied)], tensor, output)

    def gather(
        self, tensor: Tensor, output: Tensor | None, counts: Sequence[int], root: int, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        if sum(counts) > self.limit:
            sends = _only(root, (0, tensor.numel()), self.size)
            receives = _spans(counts) if output is not None else _none(self.size)
            target = tensor if output is None else output
            return self._exchange(tensor, sends, target, receives, self.next_tag(), blocking)
        source = MPI.IN_PLACE if output is not None and _overlap(tensor, output) else whole(tensor)
        target_pieces = None if output is None else pieces(output, counts)
        if blocking:
            self.communicator.Gatherv(source, target_pieces, root)
            return None
        return Requests([self.communicator.Igatherv(source, target_pieces, root)], tensor, output)

    def scatter(
        self, tensor: Tensor | None, output: Tensor, counts: Sequence[int], root: int, blocking: bool
    ) -> Pending | None:
        """See Transport."""
        if sum(counts) > self.limit:
            receives = _only(root, (0, output.numel()), self.size)
            sends = _spans(counts) if tensor is not None else _none(self.size)
            source = output if tensor is None else tensor
            return self._exchange(source, sends, output, receives, self.next_tag(), blocking)
        target = MPI.IN_PLACE if tensor is not None and _overlap(output, tensor) else whole(output)
        source_pieces = None if tensor is None else pieces(tensor, counts)
        if blocking:
            self.communicator.Scatterv(source_pieces, target, root)
            return None
        return Requests([self.communicator.Iscatterv(source_pieces, target, root)], tensor, output)

    def all_to_all(
        self,
        tensor: Tensor,
        output: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        blocking: bool,
    ) -> Pending | None:
        """See Transport."""
        # Even pieces are even on every rank, and so every rank comes here. The totals of uneven ones
        # differ, and with them whether a rank could use MPI's own: they always go in pairs.
        if send_counts is receive_counts and equal(send_counts) and tensor.numel() <= self.limit:
            # With an explicit count mpi4py wants the elements of one rank.
            count, kind = send_counts[0], TYPES[tensor.dtype]
            source = (address(tensor.data_ptr(), tensor.nbytes), count, kind)
            target = (address(output.data_ptr(), output.nbytes), count, kind)
            if blocking:
                self.communicator.Alltoall(source, target)
                return None
            return Requests([self.communicator.Ialltoall(source, target)], tensor, output)
        tag = self.next_tag()
        return self._exchange(tensor, _spans(send_counts), output, _spans(receive_counts), tag, blocking)

    def send(self, tensor: Tensor, destination: int, tag: int, blocking: bool) -> Pending | None:
        """See Transport."""
        assert 0 <= tag < USER_TAGS, tag
        parts = self._parts(tensor, 0, tensor.numel())
        if blocking:
            for part in parts:
                self.communicator.Send(part, destination, tag)
            return None
        return Requests([self.communicator.Isend(part, destination, tag) for part in parts], tensor)

    def recv(self, tensor: Tensor, source: int, tag: int, blocking: bool) -> Pending | None:
        """See Transport."""
        assert 0 <= tag < USER_TAGS, tag
        parts = self._parts(tensor, 0, tensor.numel())
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
        return self.all_gather(tensor, output, [tensor.numel()] * self.size, blocking)

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
        self,
        source: Tensor,
        sends: Sequence[Span],
        target: Tensor,
        receives: Sequence[Span],
        tag: int,
        blocking: bool,
    ) -> Pending | None:
        requests = self.exchange(source, sends, target, receives, tag)
        if not blocking:
            return requests
        requests.wait()
        return None

    def share(self, tensor: Tensor, spans: Sequence[Span], tag: int, blocking: bool) -> Pending | None:
        """See Mover."""
        if blocking and tensor.numel() <= self.limit:
            counts = [count for _, count in spans]
            self.communicator.Allgatherv(MPI.IN_PLACE, pieces(tensor, counts))
            return None
        return self.exchange(tensor, [spans[self.rank]] * self.size, tensor, spans, tag)


def _spans(counts: Sequence[int]) -> list[Span]:
    return list(zip(starts(counts), counts, strict=True))


def _none(size: int) -> list[Span]:
    return [(0, 0)] * size


def _only(rank: int, span: Span, size: int) -> list[Span]:
    spans = _none(size)
    spans[rank] = span
    return spans


def _overlap(piece: Tensor, tensor: Tensor) -> bool:
    """Whether `piece` begins inside the memory of `tensor`, as a rank's own place does."""
    return 0 <= piece.data_ptr() - tensor.data_ptr() < tensor.nbytes
