"""The transport over host memory: MPI through mpi4py.

Tensors reach MPI as addresses, without a copy. Half types travel as 16-bit integers, bool and fp8 as
bytes. Plain MPI reduces where every order gives the same bits: integers, bool, and small sums of two
ranks in fp32 and fp64; everything else goes through `reduction`, and so do the sums of short integers,
which Open MPI lets saturate. Blocking calls are MPI's blocking calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm import reduction
from hpctrain.comm.calls import Call, Operation
from hpctrain.comm.library import MPI
from hpctrain.comm.reduction import ReductionScratch
from hpctrain.comm.transport import Pending, Span, Transport, drive, spans_of, starts

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

    def __init__(
        self, communicator: MPI.Intracomm, scratch: ReductionScratch, limit: int = MESSAGE_LIMIT
    ) -> None:
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

    def run(self, call: Call) -> Pending | None:
        """See Transport."""
        return RUN[call.operation](self, call)

    def scratch_bytes(self, elements: int, itemsize: int) -> int:
        """See Transport."""
        return scratch_bytes(elements, itemsize, self.size)

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

    def _all_reduce(self, call: Call) -> Pending | None:
        tensor, operation, blocking = call.tensor, call.reduced, call.blocking
        assert tensor is not None and operation is not None
        plain = self._plain(tensor, operation, BLOCKING_SUM_BYTES if blocking else STARTED_SUM_BYTES)
        if plain is None:
            return drive(reduction.all_reduce(self, flat(tensor), operation, blocking), blocking)
        parts = self._all(tensor)
        if blocking:
            for part in parts:
                self.communicator.Allreduce(MPI.IN_PLACE, part, plain)
            return None
        return Requests([self.communicator.Iallreduce(MPI.IN_PLACE, part, plain) for part in parts], tensor)

    def _reduce(self, call: Call) -> Pending | None:
        tensor, operation, blocking, root = call.tensor, call.reduced, call.blocking, call.root
        assert tensor is not None and operation is not None
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

    def _reduce_scatter(self, call: Call) -> Pending | None:
        tensor, output, operation, counts = call.tensor, call.output, call.reduced, call.counts
        assert tensor is not None and output is not None and operation is not None
        plain = self._plain(tensor, operation, SCATTERED_SUM_BYTES)
        if plain is None or tensor.numel() > self.limit or _overlap(output, tensor):
            steps = reduction.reduce_scatter(
                self, flat(tensor), flat(output), counts, operation, call.blocking
            )
            return drive(steps, call.blocking)
        comm, target = self.communicator, whole(output)
        if counts is None:
            now, later = comm.Reduce_scatter_block, comm.Ireduce_scatter_block
            return _issue(call, now, later, even(tensor, self.size), target, plain)
        return _issue(call, comm.Reduce_scatter, comm.Ireduce_scatter, whole(tensor), target, counts, plain)

    # Movement

    def _broadcast(self, call: Call) -> Pending | None:
        tensor = call.output if call.tensor is None else call.tensor
        assert tensor is not None
        parts = self._all(tensor)
        if call.blocking:
            for part in parts:
                self.communicator.Bcast(part, call.root)
            return None
        return Requests([self.communicator.Ibcast(part, call.root) for part in parts], tensor)

    def _all_gather(self, call: Call) -> Pending | None:
        comm, tensor, output, counts = self.communicator, call.tensor, call.output, call.counts
        assert tensor is not None and output is not None
        if output.numel() > self.limit:
            return self._swap(call, [(0, tensor.numel())] * self.size, spans_of(counts, output, self.size))
        source = MPI.IN_PLACE if _overlap(tensor, output) else whole(tensor)
        if counts is None:
            return _issue(call, comm.Allgather, comm.Iallgather, source, even(output, self.size))
        return _issue(call, comm.Allgatherv, comm.Iallgatherv, source, pieces(output, counts))

    def _gather(self, call: Call) -> Pending | None:
        comm, tensor, output, counts, root = (
            self.communicator,
            call.tensor,
            call.output,
            call.counts,
            call.root,
        )
        assert tensor is not None
        if self._beyond(tensor, counts):
            sends = _only(root, (0, tensor.numel()), self.size)
            receives = _none(self.size) if output is None else spans_of(counts, output, self.size)
            return self._swap(call, sends, receives)
        source = MPI.IN_PLACE if output is not None and _overlap(tensor, output) else whole(tensor)
        if counts is None:
            target = None if output is None else even(output, self.size)
            return _issue(call, comm.Gather, comm.Igather, source, target, root)
        varied = None if output is None else pieces(output, counts)
        return _issue(call, comm.Gatherv, comm.Igatherv, source, varied, root)

    def _scatter(self, call: Call) -> Pending | None:
        comm, tensor, output, counts, root = (
            self.communicator,
            call.tensor,
            call.output,
            call.counts,
            call.root,
        )
        assert output is not None
        if self._beyond(output, counts):
            receives = _only(root, (0, output.numel()), self.size)
            sends = _none(self.size) if tensor is None else spans_of(counts, tensor, self.size)
            return self._swap(call, sends, receives)
        target = MPI.IN_PLACE if tensor is not None and _overlap(output, tensor) else whole(output)
        if counts is None:
            source = None if tensor is None else even(tensor, self.size)
            return _issue(call, comm.Scatter, comm.Iscatter, source, target, root)
        varied = None if tensor is None else pieces(tensor, counts)
        return _issue(call, comm.Scatterv, comm.Iscatterv, varied, target, root)

    def _all_to_all(self, call: Call) -> Pending | None:
        comm, tensor, output = self.communicator, call.tensor, call.output
        assert tensor is not None and output is not None
        # The totals of uneven pieces differ from rank to rank, and with them whether a rank could use
        # MPI's own: they always go in pairs.
        if call.counts is None and tensor.numel() <= self.limit:
            return _issue(
                call, comm.Alltoall, comm.Ialltoall, even(tensor, self.size), even(output, self.size)
            )
        sends = spans_of(call.counts, tensor, self.size)
        return self._swap(call, sends, spans_of(call.received, output, self.size))

    def _send(self, call: Call) -> Pending | None:
        tensor, tag = call.tensor, call.tag
        assert tensor is not None and 0 <= tag < USER_TAGS, tag
        parts = self._all(tensor)
        if call.blocking:
            for part in parts:
                self.communicator.Send(part, call.peer, tag)
            return None
        return Requests([self.communicator.Isend(part, call.peer, tag) for part in parts], tensor)

    def _recv(self, call: Call) -> Pending | None:
        output, tag = call.output, call.tag
        assert output is not None and 0 <= tag < USER_TAGS, tag
        parts = self._all(output)
        if call.blocking:
            for part in parts:
                self.communicator.Recv(part, call.peer, tag)
            return None
        return Requests([self.communicator.Irecv(part, call.peer, tag) for part in parts], output)

    def _barrier(self, call: Call) -> Pending | None:
        return _issue(call, self.communicator.Barrier, self.communicator.Ibarrier)

    def _swap(self, call: Call, sends: Sequence[Span], receives: Sequence[Span]) -> Pending | None:
        """Exchange spans of the call's memory; a rank that gives or receives nothing needs only one."""
        source = call.output if call.tensor is None else call.tensor
        target = call.tensor if call.output is None else call.output
        assert source is not None and target is not None
        requests = self.exchange(source, sends, target, receives, self.next_tag())
        if not call.blocking:
            return requests
        requests.wait()
        return None

    # What reductions are made of

    def next_tag(self) -> int:
        """See Mover."""
        self._operations += 1
        return USER_TAGS + self._operations % USER_TAGS

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> Pending | None:
        """See Mover."""
        return self._all_gather(Call("all_gather", tensor, output, blocking=blocking, began=0.0))

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


RUN: Mapping[str, Callable[[MpiTransport, Call], Pending | None]] = {
    "all_reduce": MpiTransport._all_reduce,
    "reduce": MpiTransport._reduce,
    "reduce_scatter": MpiTransport._reduce_scatter,
    "broadcast": MpiTransport._broadcast,
    "all_gather": MpiTransport._all_gather,
    "gather": MpiTransport._gather,
    "scatter": MpiTransport._scatter,
    "all_to_all": MpiTransport._all_to_all,
    "send": MpiTransport._send,
    "recv": MpiTransport._recv,
    "barrier": MpiTransport._barrier,
}


def scratch_bytes(elements: int, itemsize: int, size: int) -> int:
    """Bytes that a started sum of so many elements over `size` ranks receives into at a time."""
    if size == 1:
        return 0
    share = -(-elements // size)
    if share * itemsize <= STARTED_SUM_BYTES // size:
        return 0
    return reduction.scratch_bytes(share, itemsize, size)


def _issue(
    call: Call, now: Callable[..., object], later: Callable[..., MPI.Request], *arguments: Any
) -> Pending | None:
    """MPI's blocking function, or the one that starts the same."""
    if call.blocking:
        now(*arguments)
        return None
    return Requests([later(*arguments)], call.tensor, call.output)


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
