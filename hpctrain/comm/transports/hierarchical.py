"""Transport among ranks of several nodes, with equally many consecutive ranks on each node.

For a sum the tensor is divided into slices, one for each rank of a node. The peers of a rank are the ranks
with the same number on other nodes; they handle the same slice. A rank adds its node's inputs of the slice,
which it reads from their memory, to the partial sum from the previous node, and sends the result to its peer
on the next node. So sums are added in rank order, with the bits of `reduction`; partial sums of half types
are sent in fp32. The last node has the results. It sends them back through the nodes if all ranks need all of
them, otherwise to their owners. All of this happens piece by piece, so that nodes add and links transfer at
the same time. Each byte of a node crosses its link once in each direction.

In an all-gather a rank sends its bytes to its peer on each other node, and the other ranks of that node copy
them from the peer's memory.

MPI runs all other calls: small ones, messages between nodes, and sums for which a node would send more bytes
in this way than if each rank exchanged messages with each other rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.internode import (
    PIECES_IN_FLIGHT,
    InternodeGather,
    InternodeSum,
    NodeLinks,
    piece_elements,
)
from hpctrain.comm.transports.mpi import MpiTransport, mpi_scratch_bytes
from hpctrain.comm.transports.node_memory import NodeMemory
from hpctrain.comm.transports.node_messages import NodeMessages
from hpctrain.comm.transports.reduction import HALVES
from hpctrain.comm.transports.shared import LEAST_SHARED_BYTES, REDUCTIONS, SharedTransport, memory_barrier
from hpctrain.comm.transports.transport import (
    Steps,
    Transport,
    TransportWork,
    run_steps,
)
from hpctrain.host.mpi_library import MPI

TCP_MESSAGE_BYTES = 60 * 1024
"""Bytes that Open MPI sends over TCP at once. Longer messages halve the speed if both sides send."""

PIECE_BYTES = 8 * TCP_MESSAGE_BYTES
"""Bytes of a rank's slice that are added at a time."""


class HierarchicalTransport(Transport):
    """Transport among ranks of several nodes. The constructor is collective.

    Args:
        mpi: Transport among all ranks of the group, which runs all other calls.
        memory: Memory of this node.
        local_size: Number of ranks of the group on each node.

    Attributes:
        least_bytes: Smallest call, in bytes, that uses the algorithms above and not MPI.
        piece_bytes: Bytes of a slice that are added and sent at a time.
        links: Transports to the ranks of this node and to the peers on other nodes.
    """

    least_bytes, piece_bytes = LEAST_SHARED_BYTES, PIECE_BYTES

    def __init__(self, mpi: MpiTransport, memory: NodeMemory, local_size: int) -> None:
        assert mpi.size % local_size == 0 and mpi.size > local_size > 1, (mpi.size, local_size)
        self.mpi, self.rank, self.size, self.sharers = mpi, mpi.rank, mpi.size, local_size
        node, place = divmod(mpi.rank, local_size)
        local, across = mpi.communicator.Split(node), mpi.communicator.Split(place)
        assert isinstance(local, MPI.Intracomm) and isinstance(across, MPI.Intracomm)
        shared = SharedTransport(MpiTransport(local, mpi.scratch), memory)
        self.links = NodeLinks(shared, MpiTransport(across, mpi.scratch, TCP_MESSAGE_BYTES))
        self.messages = NodeMessages(mpi.communicator, memory)

    @override
    def run(self, call: Call) -> TransportWork | None:
        local_size, local = self.links.local_size, self.links.local
        if local.takes_message(call) and call.peer // local_size == self.rank // local_size:
            return self.messages.run(call)
        if call.operation == "barrier":
            return run_steps(memory_barrier(self.links.memory, self.mpi, call), call.blocking)
        if not self.crosses_links_once(call):
            return self.mpi.run(call)
        return local.start(self._steps(call), call.blocking)

    def _steps(self, call: Call) -> Steps:
        operation = InternodeSum if call.operation in REDUCTIONS else InternodeGather
        yield from operation(self.links, self.piece_bytes, call).steps()

    @override
    def crosses_links_once(self, call: Call) -> bool:
        return is_hierarchical(call, self.links.nodes, self.links.local_size, self.least_bytes)

    @override
    def adds_at_owner(self, call: Call) -> bool:
        return not self.crosses_links_once(call) and self.mpi.adds_at_owner(call)

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.links.local.empty(shape, dtype, device)

    @override
    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if not is_common(length, dtype, self.least_bytes):
            return None
        common = self.links.local.common_zeros(length, dtype, device)
        return common if all(self.mpi.communicator.allgather(common is not None)) else None

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        if elements * itemsize < self.least_bytes:
            return self.mpi.scratch_bytes(elements, itemsize, scattered)
        return hierarchical_scratch_bytes(
            elements, itemsize, self.links.nodes, self.links.local_size, scattered
        )


def is_hierarchical(call: Call, nodes: int, local_size: int, least_bytes: int = LEAST_SHARED_BYTES) -> bool:
    """Return True if a HierarchicalTransport runs a call so that each byte crosses links once. Local.

    The result is the same on all ranks. It is False for small calls, for operations other than all_reduce,
    reduce_scatter and all_gather, and for sums with which a node would send more bytes than by messages.

    Args:
        call: The call.
        nodes: Number of nodes of the group, at least 2.
        local_size: Number of ranks on each node, at least 2.
        least_bytes: Smallest `Call.bytes` of calls that cross links once: the size of the tensor that each
            rank gives in a sum, and of the output in an all_gather.
    """
    if call.bytes < least_bytes or call.dtype is None:
        return False
    if call.operation not in REDUCTIONS:
        return call.operation == "all_gather"
    is_wide = call.dtype in HALVES and call.reduction == "sum"
    is_scattered = call.operation == "reduce_scatter"
    return call.dtype.is_floating_point and _sends_less(is_scattered, is_wide, nodes, local_size)


def is_common(length: int, dtype: torch.dtype, least_bytes: int = LEAST_SHARED_BYTES) -> bool:
    """Return True if a tensor is so large that the ranks of a node may have it in common memory. Local.

    Smaller tensors are gathered by MPI, which needs a separate output on each rank, since it may use the
    output for intermediate data.

    Args:
        length: Number of elements.
        dtype: Their type.
        least_bytes: Smallest size, in bytes, of a tensor in common memory.
    """
    return length * dtype.itemsize >= least_bytes


def hierarchical_scratch_bytes(
    elements: int, itemsize: int, nodes: int, local_size: int, scattered: bool = False
) -> int:
    """Return the host memory, in bytes, that a sum takes on each rank for partial sums and keeps. Local.

    Later sums use the same memory. The sum must be at least LEAST_SHARED_BYTES large: `mpi_scratch_bytes` is
    for smaller ones. If a node would send more bytes in this way than by MPI, it is what MpiTransport takes.

    Args:
        elements: Number of elements of each rank's input tensor.
        itemsize: Bytes per element.
        nodes: Number of nodes of the group.
        local_size: Number of ranks on each node.
        scattered: True for a reduce-scatter, False for an all-reduce.
    """
    if not _sends_less(scattered, itemsize == 2, nodes, local_size):
        return mpi_scratch_bytes(elements, itemsize, nodes * local_size, scattered)
    share = -(-elements // (nodes * local_size if scattered else local_size))
    size = min(share, piece_elements(PIECE_BYTES, itemsize, local_size))
    pieces = min(PIECES_IN_FLIGHT, -(-share // size) * (nodes if scattered else 1))
    return 1 << (pieces * size * max(itemsize, 4) - 1).bit_length()


def _sends_less(is_scattered: bool, is_wide: bool, nodes: int, local_size: int) -> bool:
    """Return True if a node sends at most as many bytes as with messages between all pairs of ranks.

    Args:
        is_scattered: True for a reduce-scatter, False for an all-reduce.
        is_wide: True for sums of 16-bit types, whose partial sums are sent in fp32 and have twice the bytes.
        nodes: Number of nodes.
        local_size: Number of ranks on each node.
    """
    forward = 2 if is_wide else 1
    backward = 1 if nodes > 2 and not is_scattered else 0  # with two nodes each one sends in one direction
    return (forward + backward) * nodes <= local_size * (nodes - 1) * (1 if is_scattered else 2)
