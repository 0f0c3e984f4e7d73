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
from typing_extensions import override

from hpctrain.comm.calls import Call, Operation
from hpctrain.comm.transports import reduction
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

Buffer = tuple[MPI.buffer, int | tuple[Sequence[int], list[int]], MPI.Datatype]
address = MPI.buffer.fromaddress


class MpiRequests:
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


def whole_buffer(tensor: Tensor) -> Buffer:
    """All of a contiguous tensor."""
    return address(tensor.data_ptr(), tensor.nbytes), tensor.numel(), MPI_TYPES[tensor.dtype]


def flat_view(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor, apart from autograd."""
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def split_buffer(tensor: Tensor, counts: Sequence[int] | None, size: int) -> Buffer:
    """All of a contiguous tensor, as pieces of `counts` elements; of equal ones mpi4py wants those of one."""
    elements = tensor.numel() // size if counts is None else (counts, offsets_of(counts))
    return address(tensor.data_ptr(), tensor.nbytes), elements, MPI_TYPES[tensor.dtype]


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
        return [whole_buffer(tensor)] if count <= self.limit else self._parts(tensor, 0, count)

    def _parts(self, tensor: Tensor, offset: int, count: int) -> list[Buffer]:
        """A span of a tensor as messages within the limit."""
        itemsize, kind, limit = tensor.itemsize, MPI_TYPES[tensor.dtype], self.limit
        begin = tensor.data_ptr() + offset * itemsize
        parts: list[Buffer] = []
        while count > 0:
            length = min(count, limit)
            parts.append((address(begin, length * itemsize), length, kind))
            begin += length * itemsize
            count -= length
        return parts

    def run(self, call: Call) -> TransportWork | None:
        """See Transport. A method below is named like each operation."""
        pending: TransportWork | None = getattr(self, f"_{call.operation}")(call)
        return pending

    @override
    def adds_once(self, call: Call) -> bool:
        assert call.tensor is not None and call.reduced is not None
        quick = BLOCKING_SUM_BYTES if call.blocking else STARTED_SUM_BYTES
        return (
            call.tensor.nbytes * self.size > reduction.SMALL_BYTES
            and self._plain(call.tensor, call.reduced, quick) is None
        )

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        return scratch_bytes(elements, itemsize, self.size, scattered)

    def _issue(self, call: Call, name: str, *messages: Sequence[object]) -> TransportWork | None:
        """MPI's blocking function of that name for the arguments of each message, or what starts the same."""
        if call.blocking:
            function = getattr(self.communicator, name)
            for arguments in messages:
                function(*arguments)
            return None
        start = getattr(self.communicator, f"I{name.lower()}")
        return MpiRequests([start(*arguments) for arguments in messages], call.tensor, call.output)

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

    def _all_reduce(self, call: Call) -> TransportWork | None:
        tensor, operation, blocking = call.tensor, call.reduced, call.blocking
        assert tensor is not None and operation is not None
        plain = self._plain(tensor, operation, BLOCKING_SUM_BYTES if blocking else STARTED_SUM_BYTES)
        if plain is None:
            return run_steps(reduction.all_reduce(self, flat_view(tensor), operation, blocking), blocking)
        if blocking and tensor.numel() <= self.limit:  # the shortest way, for small ones
            self.communicator.Allreduce(MPI.IN_PLACE, whole_buffer(tensor), plain)
            return None
        return self._issue(call, "Allreduce", *((MPI.IN_PLACE, part, plain) for part in self._all(tensor)))

    def _reduce(self, call: Call) -> TransportWork | None:
        tensor, operation, blocking, root = call.tensor, call.reduced, call.blocking, call.root
        assert tensor is not None and operation is not None
        plain = self._plain(tensor, operation, REDUCED_SUM_BYTES if blocking else STARTED_SUM_BYTES)
        if plain is None:
            return run_steps(reduction.reduce(self, flat_view(tensor), root, operation, blocking), blocking)
        parts = self._all(tensor)
        if self.rank == root:
            return self._issue(call, "Reduce", *((MPI.IN_PLACE, part, plain, root) for part in parts))
        return self._issue(call, "Reduce", *((part, None, plain, root) for part in parts))

    def _reduce_scatter(self, call: Call) -> TransportWork | None:
        tensor, output, operation, counts = call.tensor, call.output, call.reduced, call.counts
        assert tensor is not None and output is not None and operation is not None
        plain = self._plain(tensor, operation, SCATTERED_SUM_BYTES)
        if plain is None or tensor.numel() > self.limit or _overlap(output, tensor):
            steps = reduction.reduce_scatter(
                self, flat_view(tensor), flat_view(output), counts, operation, call.blocking
            )
            return run_steps(steps, call.blocking)
        if counts is not None:
            return self._issue(
                call, "Reduce_scatter", (whole_buffer(tensor), whole_buffer(output), counts, plain)
            )
        source = split_buffer(tensor, None, self.size)
        return self._issue(call, "Reduce_scatter_block", (source, whole_buffer(output), plain))

    # Movement

    def _broadcast(self, call: Call) -> TransportWork | None:
        assert call.memory is not None
        return self._issue(call, "Bcast", *((part, call.root) for part in self._all(call.memory)))

    def _move_pieces(self, call: Call) -> TransportWork | None:
        """Between this rank's own piece and those of all, which a gather or a scatter has at the root."""
        scattered = call.operation == "scatter"
        own, pieces = (call.output, call.tensor) if scattered else (call.tensor, call.output)
        assert own is not None
        if (own.numel() * self.size if call.counts is None else sum(call.counts)) > self.limit:
            return self._swap(call)
        mine = MPI.IN_PLACE if pieces is not None and _overlap(own, pieces) else whole_buffer(own)
        of_all = None if pieces is None else split_buffer(pieces, call.counts, self.size)
        name = call.operation.replace("_", "").capitalize() + "v" * (call.counts is not None)
        root = () if call.operation == "all_gather" else (call.root,)
        return self._issue(call, name, (of_all, mine, *root) if scattered else (mine, of_all, *root))

    _all_gather = _gather = _scatter = _move_pieces

    def _all_to_all(self, call: Call) -> TransportWork | None:
        tensor, output = call.tensor, call.output
        assert tensor is not None and output is not None
        # The totals of uneven pieces differ from rank to rank, and with them whether a rank could use
        # MPI's own: they always go in pairs.
        if call.counts is not None or tensor.numel() > self.limit:
            return self._swap(call)
        return self._issue(
            call, "Alltoall", (split_buffer(tensor, None, self.size), split_buffer(output, None, self.size))
        )

    def _send(self, call: Call) -> TransportWork | None:
        assert call.tensor is not None and 0 <= call.tag < USER_TAGS, call.tag
        return self._issue(call, "Send", *((part, call.peer, call.tag) for part in self._all(call.tensor)))

    def _recv(self, call: Call) -> TransportWork | None:
        assert call.output is not None and 0 <= call.tag < USER_TAGS, call.tag
        return self._issue(call, "Recv", *((part, call.peer, call.tag) for part in self._all(call.output)))

    def _barrier(self, call: Call) -> TransportWork | None:
        return self._issue(call, "Barrier", ())

    def _swap(self, call: Call) -> TransportWork | None:
        requests = self.exchange(*pairwise_ranges(call, self.size), self.next_tag())
        if not call.blocking:
            return requests
        requests.wait()
        return None

    # What reductions are made of

    def next_tag(self) -> int:
        """Return the message tag of the next operation, which is the same on all ranks."""
        self._operations += 1
        return USER_TAGS + self._operations % USER_TAGS

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> TransportWork | None:
        """Gather pieces of equal size from all ranks."""
        return self._move_pieces(Call("all_gather", tensor, output, blocking=blocking, began=0.0))

    def exchange(
        self,
        source: Tensor,
        sends: Sequence[ElementRange],
        target: Tensor,
        receives: Sequence[ElementRange],
        tag: int,
    ) -> MpiRequests:
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
        (begin, count), (position, _) = sends[self.rank], receives[self.rank]
        if (
            count
            and target.data_ptr() + position * target.itemsize != source.data_ptr() + begin * source.itemsize
        ):
            flat_view(target)[position : position + count].copy_(flat_view(source)[begin : begin + count])
        return MpiRequests(requests, source, target)

    def share(
        self, tensor: Tensor, spans: Sequence[ElementRange], tag: int, blocking: bool
    ) -> TransportWork | None:
        """Gather the consecutive spans of `tensor` from all ranks, in place."""
        if blocking and tensor.numel() <= self.limit:
            counts = [count for _, count in spans]
            self.communicator.Allgatherv(MPI.IN_PLACE, split_buffer(tensor, counts, self.size))
            return None
        return self.exchange(tensor, [spans[self.rank]] * self.size, tensor, spans, tag)


def scratch_bytes(elements: int, itemsize: int, size: int, scattered: bool = False) -> int:
    """Bytes that a started sum of so many elements over `size` ranks receives into at a time; `scattered`
    where each keeps its piece. MPI's own sums need none.
    """
    quick = SCATTERED_SUM_BYTES if scattered else STARTED_SUM_BYTES
    if size == 1 or (size == 2 and itemsize >= 4 and elements * itemsize <= quick):
        return 0
    return reduction.scratch_bytes(elements, itemsize, size)


def _overlap(piece: Tensor, tensor: Tensor) -> bool:
    """Whether `piece` begins inside the memory of `tensor`, as a rank's own piece of it does: an empty one,
    too, so that all ranks say the same.
    """
    if not piece.numel():
        return piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    begin = tensor.data_ptr()
    return begin <= piece.data_ptr() < begin + tensor.nbytes
