"""Transport among ranks of one node, which read and write each other's memory.

Other ranks read a tensor that `empty` has allocated directly. Any other tensor is copied, round by round,
through memory that they see. The owner of each piece adds in rank order, as in `reduction`, so that this
transport and `MpiTransport` give the same bits. Small blocking sums and all-gathers are run by
`SmallOperations`, all other small operations by MPI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call, Reduction
from hpctrain.comm.transports.mpi import MpiTransport
from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.node_messages import NodeMessages
from hpctrain.comm.transports.progress_counters import (
    ROUNDS,
    SLOTS,
    OperationCounters,
    PieceLayout,
    ProgressCounters,
)
from hpctrain.comm.transports.reduction import BLOCK, equal_counts, reduce_block
from hpctrain.comm.transports.small_messages import SmallOperations
from hpctrain.comm.transports.transport import (
    ElementRange,
    SteppedWork,
    Steps,
    Transport,
    TransportWork,
    flat_view,
    pairwise_ranges,
    ranges_of_ranks,
    run_steps,
)

SHARED_BYTES = 256 * 1024
"""Smallest sum, in bytes, through shared memory in rounds. MPI and SmallOperations are faster for less."""

MOVED_BYTES = 4 << 20
"""Smallest call of MOVEMENTS, in bytes, through shared memory. Below it, MPI is as fast."""

MESSAGE_BYTES = 16 * 1024
"""Smallest message, in bytes, through shared memory. Shorter ones arrive even while the sender computes."""

MESSAGE_MOST_BYTES = 64 << 20
"""Largest message, in bytes, through shared memory. The copy of a larger one would take too much memory."""

VISIBLE_BYTES = 64 * 1024
"""Smallest tensor, in bytes, that `empty` allocates in shared memory, which consists of whole pages."""

ROUND_BYTES = 4 << 20
"""Bytes of a tensor that are copied in one round."""

STAGED_ROUNDS = 2
"""Rounds for which a rank has memory through which it copies."""

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
        least_bytes: Value of SHARED_BYTES (tests set others, as for the next four).
        least_moved_bytes: Value of MOVED_BYTES.
        least_message_bytes: Value of MESSAGE_BYTES.
        least_visible_bytes: Value of VISIBLE_BYTES.
        round_bytes: Value of ROUND_BYTES. Ranks report progress after each round.
    """

    least_bytes, least_moved_bytes, least_message_bytes = SHARED_BYTES, MOVED_BYTES, MESSAGE_BYTES
    least_visible_bytes, round_bytes = VISIBLE_BYTES, ROUND_BYTES

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
        """Run or start the steps of an operation that opens counters, as `run_steps` does.

        It first waits for the operation that has used the same slot before.
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
        """Return True if a call is a message that uses shared memory; the same on sender and receiver."""
        return call.operation in MESSAGES and self.least_message_bytes <= call.bytes <= MESSAGE_MOST_BYTES

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
        assert call.tensor is not None and call.reduction is not None
        tensor, output = flat_view(call.tensor), None
        if call.operation == "all_reduce":
            counts: Sequence[int] | None = equal_counts(tensor.numel(), self.size)
        else:
            assert call.output is not None
            counts, output = call.counts, flat_view(call.output)
        ranges = ranges_of_ranks(counts, tensor, self.size)
        published = self._publish(tensor, ranges, in_rounds=True)
        counters, (begin, count) = published.counters, ranges[self.rank]
        for index in range(published.rounds):
            yield counters.until_ready(self._peers, index + 1)
            first = index * published.elements
            length = min(published.elements, count - first)
            if length > 0:
                own = tensor[begin + first : begin + first + length]
                target = own if output is None else output[first : first + length]
                locations = [counters.layout_of(peer).at(self.rank, index) for peer in self._peers]
                peers = [self.memory.tensor_at(location, length, own.dtype) for location in locations]
                self._add(own, peers, target, call.reduction, write_to_peers=output is None)
            counters.set_finished(index + 1)
            if published.is_copy:
                yield counters.until_finished(self._peers, index + 1)
                if output is None:
                    published.copy_back(index)
                published.copy_round(index + STAGED_ROUNDS)
        counters.set_finished()
        yield counters.until_finished(self._peers)
        published.close()

    def _add(
        self,
        local_piece: Tensor,
        peers: Sequence[Tensor],
        target: Tensor,
        reduction: Reduction,
        write_to_peers: bool,
    ) -> None:
        """Reduce the ranks' pieces in rank order into `target`, and write it over the peers' if asked."""
        parts = [local_piece, *peers]
        parts = [parts[(rank - self.rank) % self.size] for rank in range(self.size)]
        spare = local_piece.new_empty(min(BLOCK, len(local_piece))) if self.rank > 1 else None
        for *blocks, result in zip(*(part.split(BLOCK) for part in (*parts, target)), strict=True):
            reduce_block(blocks, result, reduction, self.rank, spare)
            for rank in self._peers if write_to_peers else ():
                blocks[rank].copy_(result)

    # Movement

    def _move(self, call: Call) -> Steps:
        source, sends, target, receives = _byte_ranges(call, self.size)
        (begin, count), (position, _) = sends[self.rank], receives[self.rank]
        if count and source.data_ptr() + begin != target.data_ptr() + position:
            target[position : position + count].copy_(source[begin : begin + count])
        published = self._publish(source, sends, in_rounds=False)
        counters = published.counters
        remaining = {peer: receives[peer] for peer in self._peers if receives[peer][1]}
        index = 0
        while remaining or index < published.rounds:
            yield counters.until_ready(remaining, index + 1)
            for peer, (start, length) in list(remaining.items()):
                layout = counters.layout_of(peer)
                first = index * layout.elements
                last = min(first + layout.elements, length)
                part, location = target[start + first : start + last], layout.at(self.rank, index)
                if self.memory.find(part) != location:  # nothing moves within the same memory
                    part.copy_(self.memory.tensor_at(location, last - first, torch.uint8))
                if last == length:
                    del remaining[peer]
            index += 1
            counters.set_finished(index if remaining else ROUNDS)
            if published.is_copy and index + 1 < published.rounds:
                yield counters.until_finished(self._peers, index)
                published.copy_round(index + 1)
        counters.set_finished()
        yield counters.until_finished(self._peers)
        published.close()

    def _gather_common(self, call: Call, common: Tensor) -> Steps:
        """Write this rank's piece into common memory, and wait until all ranks have written theirs."""
        assert call.tensor is not None
        begin, count = ranges_of_ranks(call.counts, common, self.size)[self.rank]
        own = flat_view(common)[begin : begin + count]
        if own.data_ptr() != call.tensor.data_ptr():
            own.copy_(flat_view(call.tensor))
        counters = self.counters.open()
        counters.set_finished()
        yield counters.until_finished(self._peers)

    def _publish(self, tensor: Tensor, ranges: Sequence[ElementRange], in_rounds: bool) -> _PublishedTensor:
        counters = self.counters.open()
        return _PublishedTensor(counters, self.memory, self.rank, tensor, ranges, self.round_bytes, in_rounds)


class _PublishedTensor:
    """Ranges of a tensor, one for each rank, that the other ranks of the node can read.

    They read the tensor itself if it is in memory that they see, otherwise copies of it, round by round. The
    first rounds are ready when the constructor returns. There is no copy of this rank's own range.

    Args:
        counters: Counters of the operation.
        memory: Memory of the node.
        rank: This rank in the group.
        tensor: Flat tensor.
        ranges: Range of the tensor for each rank.
        round_bytes: Bytes of the tensor in one round.
        in_rounds: True if the tensor itself is read in rounds, too; otherwise it is one round.
    """

    def __init__(
        self,
        counters: OperationCounters,
        memory: NodeMemory,
        rank: int,
        tensor: Tensor,
        ranges: Sequence[ElementRange],
        round_bytes: int,
        in_rounds: bool,
    ) -> None:
        self.counters, self._memory = counters, memory
        self._tensor, itemsize, size = tensor, tensor.itemsize, len(ranges)
        same_range, longest = len(set(ranges)) == 1, max(count for _, count in ranges)
        location = memory.find(tensor) if longest else MemoryLocation(memory.rank, 0)
        self.is_copy = location is None
        self.elements = max(1, round_bytes // itemsize // (1 if same_range else size))
        if not (self.is_copy or in_rounds):
            self.elements = max(1, longest)
        self.rounds = -(-longest // self.elements)
        assert self.rounds < ROUNDS, (tensor.shape, self.rounds)
        self._staging: Tensor | None = None
        if location is None:
            self._staging = take_staging(memory)
            location = memory.find(self._staging)
            assert location is not None
            offsets = [0 if same_range else peer * self.elements for peer in range(size)]
            stride, turns = self._staging.nbytes // STAGED_ROUNDS, STAGED_ROUNDS
            staging = self._staging.view(tensor.dtype)
            self._staged = staging.split(len(staging) // STAGED_ROUNDS)
            peers = [peer for peer in range(size) if peer != rank]
            self._copied = [(ranges[peer], offsets[peer]) for peer in (peers[:1] if same_range else peers)]
        else:
            offsets, stride, turns = [begin for begin, _ in ranges], self.elements * itemsize, ROUNDS
        byte_offsets = [offset * itemsize for offset in offsets]
        counters.set_layout(PieceLayout(location, self.elements, stride, turns, byte_offsets))
        if not self.is_copy:
            counters.set_ready(self.rounds)
        for index in range(min(STAGED_ROUNDS, self.rounds) if self.is_copy else 0):
            self.copy_round(index)

    def copy_round(self, index: int) -> None:
        """Copy a round, if there is one, to memory that the others see and whose last round is finished."""
        if index < self.rounds:
            for part, copied in self._pairs(index):
                copied.copy_(part)
            self.counters.set_ready(index + 1)

    def copy_back(self, index: int) -> None:
        """Copy what the others have written into a round back into the tensor."""
        for part, copied in self._pairs(index):
            part.copy_(copied)

    def close(self) -> None:
        """Release the memory, after all ranks have finished."""
        if self._staging is not None:
            self._memory.free_staging.append(self._staging)

    def _pairs(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of the tensor in a round, each with its copy."""
        first = index * self.elements
        for (begin, count), start in self._copied:
            length = min(self.elements, count - first)
            if length > 0:
                part = self._tensor[begin + first : begin + first + length]
                yield part, self._staged[index % STAGED_ROUNDS][start : start + length]


def take_staging(memory: NodeMemory) -> Tensor:
    """Return memory for STAGED_ROUNDS rounds. The caller appends it to `memory.free_staging` afterwards.

    Raises:
        MemoryError: The system has no memory left.
    """
    if memory.free_staging:
        return memory.free_staging.pop()
    staging = memory.empty((STAGED_ROUNDS * ROUND_BYTES,), torch.uint8)
    if staging is None:
        raise MemoryError("the node has no memory left to copy through")
    return staging


def memory_barrier(memory: NodeMemory, mpi: MpiTransport, call: Call) -> Steps:
    """Run a barrier that also orders reads and writes of shared memory."""
    memory.fence()
    yield mpi.run(call)
    memory.fence()


def _byte_ranges(call: Call, size: int) -> tuple[Tensor, list[ElementRange], Tensor, list[ElementRange]]:
    """Return `pairwise_ranges` in bytes, with flat tensors of bytes."""
    source, sends, target, receives = pairwise_ranges(call, size)

    def in_bytes(ranges: Sequence[ElementRange], itemsize: int) -> list[ElementRange]:
        return [(begin * itemsize, count * itemsize) for begin, count in ranges]

    return (
        flat_view(source).view(torch.uint8),
        in_bytes(sends, source.itemsize),
        flat_view(target).view(torch.uint8),
        in_bytes(receives, target.itemsize),
    )
