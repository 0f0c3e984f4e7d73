"""Transport among ranks of one node, which read and write each other's memory.

Other ranks read a tensor that `empty` has allocated directly. Any other tensor is copied, round by round,
through memory that they see. The owner of each piece adds in rank order, as in `reduction`, so that this
transport and `MpiTransport` give the same bits. Small blocking sums and all-gathers are run by
`SmallOperations`, all other small operations by MPI.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call, Reduction
from hpctrain.comm.transports.mpi import MpiTransport
from hpctrain.comm.transports.node_memory import NodeMemory
from hpctrain.comm.transports.node_messages import NodeMessages
from hpctrain.comm.transports.node_operation import NodeOperation, rounds_of
from hpctrain.comm.transports.progress_counters import (
    COPY_ROUND_BYTES,
    ROUNDS,
    SLOTS,
    STAGED_ROUNDS,
    ProgressCounters,
)
from hpctrain.comm.transports.reduction import REDUCTION_BLOCK, equal_counts, reduce_block
from hpctrain.comm.transports.small_messages import SmallOperations
from hpctrain.comm.transports.transport import (
    ElementRange,
    PieceExchange,
    SteppedWork,
    Steps,
    Transport,
    TransportWork,
    flat_view,
    pairwise_ranges,
    ranges_of_ranks,
    run_steps,
)

LEAST_SHARED_BYTES = 256 * 1024
"""Smallest sum, in bytes, through shared memory in rounds. MPI and SmallOperations are faster for less."""

LEAST_MOVED_BYTES = 4 << 20
"""Smallest call of MOVEMENTS, in bytes, through shared memory. Below it, MPI is as fast."""

LEAST_MESSAGE_BYTES = 16 * 1024
"""Smallest message, in bytes, through shared memory. Shorter ones arrive even while the sender computes."""

MOST_MESSAGE_BYTES = 64 << 20
"""Largest message, in bytes, through shared memory. The copy of a larger one would take too much memory."""

LEAST_VISIBLE_BYTES = 64 * 1024
"""Smallest tensor, in bytes, that `empty` allocates in shared memory, which consists of whole pages."""

REDUCTIONS = frozenset({"all_reduce", "reduce_scatter"})
MESSAGES = frozenset({"send", "recv"})
MOVEMENTS = frozenset({"all_gather", "gather", "scatter", "all_to_all", "broadcast"})


class SharedTransport(Transport):
    """Transport among ranks that see each other's memory. The constructor is collective.

    Args:
        mpi: Transport among the same ranks, which runs all calls that do not use shared memory.
        memory: Shared memory of the node.

    Attributes:
        users: For each rank of the group, its rank in the world of all processes.
        small_operations: Operations on small tensors.
        least_bytes: Value of LEAST_SHARED_BYTES (tests set others, as for the next four).
        least_moved_bytes: Value of LEAST_MOVED_BYTES.
        least_message_bytes: Value of LEAST_MESSAGE_BYTES.
        least_visible_bytes: Value of LEAST_VISIBLE_BYTES.
        round_bytes: Value of COPY_ROUND_BYTES. Ranks report progress after each round.
    """

    least_bytes, least_moved_bytes = LEAST_SHARED_BYTES, LEAST_MOVED_BYTES
    least_message_bytes, least_visible_bytes = LEAST_MESSAGE_BYTES, LEAST_VISIBLE_BYTES
    round_bytes = COPY_ROUND_BYTES

    def __init__(self, mpi: MpiTransport, memory: NodeMemory) -> None:
        self.mpi, self.memory = mpi, memory
        self.rank, self.size = mpi.rank, mpi.size
        self.sharers = mpi.size
        self.users: tuple[int, ...] = tuple(mpi.communicator.allgather(memory.rank))
        self.counters = ProgressCounters(mpi.communicator, memory)
        self.messages = NodeMessages(mpi.communicator, memory)
        self.small_operations = SmallOperations(mpi.communicator, memory, self.users)
        self._common_bytes = [0] * self.size  # bytes of common memory that each rank owns
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._in_flight: list[SteppedWork | None] = [None] * SLOTS

    @override
    def run(self, call: Call) -> TransportWork | None:
        if call.operation == "barrier":
            return run_steps(memory_barrier(self.memory, self.mpi, call), call.blocking)
        common = call.output if call.operation == "all_gather" else None
        if common is not None and self.memory.is_common(common, self.users):
            return self.start(self._gather_common(call, common), call.blocking)
        if self.small_operations.run(call):
            return None
        if not self._uses_memory(call):
            return self.mpi.run(call)
        if call.operation in MESSAGES:
            return self.messages.run(call)
        steps = self._reduce(call) if call.operation in REDUCTIONS else self._move(call)
        return self.start(steps, call.blocking)

    def start(self, steps: Steps, blocking: bool) -> TransportWork | None:
        """Run all steps of an operation if `blocking`; otherwise start them, and return a handle. Collective.

        All ranks of the group call it in the same order. At most SLOTS operations of the group are in flight.
        So this first waits, even if not `blocking`, until the operation that was started SLOTS operations
        before is complete on this rank. A started operation makes progress only while handles of operations
        are tested or waited for.

        Args:
            steps: Steps of one operation. When the first step runs, it must call `counters.open()` of this
                transport, once for the operation, as the constructor of NodeOperation does.
            blocking: True to return only after the operation is complete on this rank.

        Returns:
            None if `blocking`, otherwise the handle of the operation.
        """
        slot = self.counters.next_slot
        before = self._in_flight[slot]
        if before is not None:
            before.wait()
            self._in_flight[slot] = None
        work = run_steps(steps, blocking)
        if isinstance(work, SteppedWork):
            self._in_flight[slot] = work
        return work

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        visible = None
        if torch.Size(shape).numel() * dtype.itemsize >= self.least_visible_bytes:
            visible = self.memory.empty(shape, dtype)
        return super().empty(shape, dtype, device) if visible is None else visible

    @override
    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        size = length * dtype.itemsize
        owner = self._common_bytes.index(min(self._common_bytes))  # ranks own about equal parts
        self._common_bytes[owner] += size
        location = self.memory.take_common(size, self.size) if owner == self.rank else None
        location = self.mpi.communicator.bcast(location, owner)
        return None if location is None else self.memory.common_tensor(location, length, dtype, self.users)

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        if elements * itemsize >= self.least_bytes:
            return 0
        return self.mpi.scratch_bytes(elements, itemsize, scattered)

    @override
    def adds_at_owner(self, call: Call) -> bool:
        if call.blocking and call.bytes <= self.small_operations.most_bytes:
            return False
        return self._uses_memory(call) or self.mpi.adds_at_owner(call)

    def takes_message(self, call: Call) -> bool:
        """Return True if a call is a message that uses shared memory; the same on sender and receiver. Local.

        These are sends and receives of `least_message_bytes` to MOST_MESSAGE_BYTES. Whether the peer is on
        this node is not checked.
        """
        return call.operation in MESSAGES and self.least_message_bytes <= call.bytes <= MOST_MESSAGE_BYTES

    def _uses_memory(self, call: Call) -> bool:
        """Return True if a call goes through shared memory; the same on all ranks."""
        operation, dtype = call.operation, call.dtype
        if operation in REDUCTIONS:
            return call.bytes >= self.least_bytes and dtype is not None and dtype.is_floating_point
        if operation in MESSAGES:
            return self.takes_message(call)
        # No rank knows the total size of an all-to-all of uneven pieces.
        is_large_enough = call.bytes >= self.least_moved_bytes or call.receive_counts is not None
        return operation in MOVEMENTS and is_large_enough

    # Sums

    def _reduce(self, call: Call) -> Steps:
        assert call.reduction is not None
        tensor, output, counts = flat_view(call.tensor), None, call.counts
        if call.operation == "all_reduce":
            counts = equal_counts(len(tensor), self.size)
        else:
            output = flat_view(call.output)
        elements = max(1, self.round_bytes // tensor.itemsize // self.size)
        rounds = list(rounds_of(ranges_of_ranks(counts, tensor, self.size), elements))
        operation = NodeOperation(self.counters, tensor, rounds, elements)
        operation.publish()
        for index, (pieces, _, first) in enumerate(rounds):
            yield operation.until_ready(index)
            length = pieces[self.rank][1]
            if length:
                parts = operation.pieces_of_ranks(index)
                target = parts[self.rank] if output is None else output[first : first + length]
                self._add(parts, target, call.reduction, write_to_peers=output is None)
            operation.counters.set_finished(index + 1)
            if operation.is_copy:
                yield from operation.reuse_copies(index, copy_back=output is None)
        yield from operation.finish()

    def _add(
        self, parts: Sequence[Tensor], target: Tensor, reduction: Reduction, write_to_peers: bool
    ) -> None:
        """Reduce the ranks' parts in rank order into `target`, and write it over the peers' if asked."""
        spare = target.new_empty(min(REDUCTION_BLOCK, len(target))) if self.rank > 1 else None
        for *blocks, result in zip(*(part.split(REDUCTION_BLOCK) for part in (*parts, target)), strict=True):
            reduce_block(blocks, result, reduction, self.rank, spare)
            for rank in self._peers if write_to_peers else ():
                blocks[rank].copy_(result)

    # Movement

    def _move(self, call: Call) -> Steps:
        source, sends, target, receives = _bytewise_ranges(call, self.size)
        (begin, count), (position, _) = sends[self.rank], receives[self.rank]
        if count and source.data_ptr() + begin != target.data_ptr() + position:
            target[position : position + count].copy_(source[begin : begin + count])
        elements = max(1, *(count for _, count in sends))
        if self.memory.find(source) is None:
            elements = max(1, self.round_bytes // (1 if len(set(sends)) == 1 else self.size))
        rounds = list(rounds_of(sends, elements))
        operation = NodeOperation(self.counters, source, rounds, elements)
        operation.publish()
        counters = operation.counters
        remaining = {peer: receives[peer] for peer in self._peers if receives[peer][1]}
        index = 0
        while remaining or index < len(rounds):
            yield counters.until_ready(remaining, index + 1)
            for peer, (start, length) in list(remaining.items()):
                layout = operation.layout_of(peer)
                first = index * layout.elements
                last = min(first + layout.elements, length)
                part, location = target[start + first : start + last], layout.at(self.rank, index)
                if self.memory.find(part) != location:  # nothing moves within the same memory
                    part.copy_(self.memory.tensor_at(location, last - first, torch.uint8))
                if last == length:
                    del remaining[peer]
            index += 1
            counters.set_finished(index if remaining else ROUNDS)
            if operation.is_copy and index - 1 + STAGED_ROUNDS < len(rounds):
                yield from operation.reuse_copies(index - 1, copy_back=False)
        yield from operation.finish()

    def _gather_common(self, call: Call, common: Tensor) -> Steps:
        """Write this rank's piece into common memory, and wait until all ranks have written theirs."""
        assert call.tensor is not None
        begin, count = ranges_of_ranks(call.counts, common, self.size)[self.rank]
        local_piece = flat_view(common)[begin : begin + count]
        if local_piece.data_ptr() != call.tensor.data_ptr():
            local_piece.copy_(flat_view(call.tensor))
        counters = self.counters.open()
        counters.set_finished()
        yield counters.until_finished(self._peers)


def memory_barrier(memory: NodeMemory, mpi: MpiTransport, call: Call) -> Steps:
    """Return the steps of a barrier that also orders reads and writes of shared memory. Collective.

    Args:
        memory: Memory of the node.
        mpi: Transport that runs the barrier.
        call: The barrier. If it is blocking, the first step waits.
    """
    memory.fence()
    yield mpi.run(call)
    memory.fence()


def _bytewise_ranges(call: Call, size: int) -> PieceExchange:
    """Return `pairwise_ranges` in bytes, with flat tensors of bytes."""
    source, sends, target, receives = pairwise_ranges(call, size)

    def in_bytes(ranges: Sequence[ElementRange], itemsize: int) -> list[ElementRange]:
        return [(begin * itemsize, count * itemsize) for begin, count in ranges]

    return PieceExchange(
        flat_view(source).view(torch.uint8),
        in_bytes(sends, source.itemsize),
        flat_view(target).view(torch.uint8),
        in_bytes(receives, target.itemsize),
    )
