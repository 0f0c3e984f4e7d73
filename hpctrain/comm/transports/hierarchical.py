"""The transport between ranks of several nodes, each with as many of them, in the order of the nodes.

Of every sum each rank of a node carries a slice: it adds what the ranks of its node have of that, where it
lies in their memory, to what came from the node before, and sends it on to the next one's rank of the same
place. So sums are added in rank order, as in `reduction`, and have the same bits; of half types what travels
is their sum in fp32. The last node has the sums, and sends them back: to each node before it, where all want
all of them, else to their owner. All this goes piece by piece, so that nodes add, and links carry, at once:
whatever the ranks of a node have together passes its link once each way. What is gathered comes from the rank
of the same place on every other node, and from there through the memory of the node.

What is small, sums of which nodes would send more than by messages, other operations, and messages between
nodes are left to MPI.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.crossing import NodeLinks, piece_elements
from hpctrain.comm.transports.gather_across import InternodeGather
from hpctrain.comm.transports.mpi import MpiTransport, flat_view
from hpctrain.comm.transports.mpi import scratch_bytes as mpi_scratch_bytes
from hpctrain.comm.transports.node_memory import NodeMemory
from hpctrain.comm.transports.node_messages import NodeMessages
from hpctrain.comm.transports.shared import REDUCTIONS, SHARED_BYTES, SharedTransport, memory_barrier
from hpctrain.comm.transports.sum_across import FLIGHT, HALVES, InternodeSum
from hpctrain.comm.transports.transport import Steps, Transport, TransportWork, ranges_of_ranks, run_steps
from hpctrain.host.mpi_library import MPI

MESSAGE_BYTES = 60 * 1024  # what Open MPI sends over TCP at once; longer ones halve a link used both ways
PIECE_BYTES = 8 * MESSAGE_BYTES  # of a rank's slice, added at a time


class HierarchicalTransport(Transport):
    """The primitives among ranks of which `local` neighbours each see each other's `memory`.

    What is not for it is done by `mpi`, over all of them. `least` are the bytes from which on a call is,
    `piece_bytes` those that are sent at a time.
    """

    least, piece_bytes = SHARED_BYTES, PIECE_BYTES

    def __init__(self, mpi: MpiTransport, memory: NodeMemory, local: int) -> None:
        """Collective over the ranks of `mpi`."""
        assert mpi.size % local == 0 and mpi.size > local > 1, (mpi.size, local)
        self.mpi, self.rank, self.size, self.sharers = mpi, mpi.rank, mpi.size, local
        node, place = divmod(mpi.rank, local)
        near, far = mpi.communicator.Split(node), mpi.communicator.Split(place)
        assert isinstance(near, MPI.Intracomm) and isinstance(far, MPI.Intracomm)
        inside = SharedTransport(MpiTransport(near, mpi.scratch), memory)
        self.ways = NodeLinks(inside, MpiTransport(far, mpi.scratch, MESSAGE_BYTES))
        self.messages = NodeMessages(mpi.communicator, memory)

    @override
    def run(self, call: Call) -> TransportWork | None:
        local, inside = self.ways.local, self.ways.inside
        if inside.takes_message(call) and call.peer // local == self.rank // local:
            return self.messages.run(call)
        if call.operation == "barrier":
            return run_steps(memory_barrier(self.ways.memory, self.mpi, call), call.blocking)
        if not self.crosses_once(call):
            return self.mpi.run(call)
        steps = self._reduce(call) if call.operation in REDUCTIONS else self._gather(call)
        return inside.start(steps, call.blocking)

    @override
    def crosses_once(self, call: Call) -> bool:
        return is_hierarchical(call, self.ways.nodes, self.ways.local, self.least)

    def adds_once(self, call: Call) -> bool:
        """See Transport. Over nodes each sum passes through several ranks."""
        return not self.crosses_once(call) and self.mpi.adds_once(call)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See Transport. Memory that the ranks of the node see, where there is any."""
        return self.ways.inside.empty(shape, dtype, device)

    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """See Transport. The node's, of what is gathered through its memory; on all nodes, or on none."""
        if not is_common(length, dtype, self.least):
            return None
        common = self.ways.inside.common_zeros(length, dtype, device)
        return common if all(self.mpi.communicator.allgather(common is not None)) else None

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        if elements * itemsize < self.least:
            return self.mpi.scratch_bytes(elements, itemsize, scattered)
        return scratch_bytes(elements, itemsize, self.ways.nodes, self.ways.local, scattered)

    def _reduce(self, call: Call) -> Steps:
        tensor, output, operation = call.tensor, call.output, call.reduced
        assert tensor is not None and output is not None and operation is not None
        parts = None if call.operation == "all_reduce" else flat_view(output)
        across = InternodeSum(self.ways, self.piece_bytes, flat_view(tensor), parts, call.counts, operation)
        yield from across.steps()

    def _gather(self, call: Call) -> Steps:
        assert call.tensor is not None and call.output is not None
        source, target = flat_view(call.tensor).view(torch.uint8), flat_view(call.output).view(torch.uint8)
        size = call.output.itemsize
        spans = [
            (begin * size, count * size)
            for begin, count in ranges_of_ranks(call.counts, call.output, self.size)
        ]
        yield from InternodeGather(self.ways, self.piece_bytes, source, target, spans).steps()


def is_hierarchical(call: Call, nodes: int, local: int, least: int = SHARED_BYTES) -> bool:
    """Whether a call, of so many bytes or more, is for links to be crossed once: the same on all ranks."""
    if call.bytes < least or call.dtype is None:
        return False
    if call.operation not in REDUCTIONS:
        return call.operation == "all_gather"
    wide = call.dtype in HALVES and call.reduced == "sum"
    return call.dtype.is_floating_point and _is_less(call.operation == "reduce_scatter", wide, nodes, local)


def is_common(length: int, dtype: torch.dtype, least: int = SHARED_BYTES) -> bool:
    """Whether so many elements may be one memory on a node: what MPI gathers is each rank's own, as it may
    lie there in another order until it is complete.
    """
    return length * dtype.itemsize >= least


def _is_less(scattered: bool, wide: bool, nodes: int, local: int) -> bool:
    """Whether a node sends no more of a sum so than by messages from each rank to each: what is `wide` takes
    twice the bytes until it is summed up.
    """
    onward = 2 if wide else 1
    back = 1 if nodes > 2 and not scattered else 0  # of two nodes each sends one way
    return (onward + back) * nodes <= local * (nodes - 1) * (1 if scattered else 2)


def scratch_bytes(elements: int, itemsize: int, nodes: int, local: int, scattered: bool = False) -> int:
    """Host memory kept for what comes of a sum of so many elements at a time: pieces that are under way, in
    fp32 where elements are halves.
    """
    if not _is_less(scattered, itemsize == 2, nodes, local):
        return mpi_scratch_bytes(elements, itemsize, nodes * local, scattered)
    share = -(-elements // (nodes * local if scattered else local))
    size = min(share, piece_elements(PIECE_BYTES, itemsize, local))
    pieces = min(FLIGHT, -(-share // size) * (nodes if scattered else 1))
    return 1 << (pieces * size * max(itemsize, 4) - 1).bit_length()
