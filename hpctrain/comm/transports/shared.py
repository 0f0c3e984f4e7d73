"""The transport between ranks of one node: they read, and write, each other's memory where it lies.

In memory from `empty` a tensor is read by the others as it is. Another one is copied, round by round, through
memory that they see. Sums are added in rank order by the owner of each piece, as in `reduction`, so that
both transports give the same bits. What is smaller and blocks is `inline`; the rest of what is small is left
to MPI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call, Operation
from hpctrain.comm.transports.mpi import MpiTransport, flat_view
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
from hpctrain.comm.transports.small_messages import (
    SmallOperations,
    open_small_operations,
    small_operation_bytes,
)
from hpctrain.comm.transports.transport import (
    ElementRange,
    SteppedWork,
    Steps,
    Transport,
    TransportWork,
    pairwise_ranges,
    ranges_of_ranks,
    run_steps,
)

SHARED_BYTES = 256 * 1024
"""Smaller sums are MPI's, where they are not inline: its own small messages take less time than ours."""

MOVED_BYTES = 4 << 20
"""The same of what moves without being added, where MPI copies as we do."""

PAIR_BYTES = 8 * 1024
"""Smaller sums of two ranks are MPI's own, where all others of its are of several steps."""

MESSAGE_BYTES = 16 * 1024
"""Shorter messages between two ranks are MPI's, which carries them without their sender's help."""

MESSAGE_MOST_BYTES = 64 << 20
"""Longer ones are MPI's: copied as a whole they would take too much memory."""

SEEN_BYTES = 64 * 1024
"""Smaller tensors are in memory of the process alone, which does not come in pages: their sums are MPI's."""

ROUND_BYTES = 4 << 20  # of a tensor, in one round
STAGED_ROUNDS = 2  # rounds that a rank's memory for copies has room for
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter"})
MESSAGES = frozenset({"send", "recv"})
MOVEMENTS = frozenset({"all_gather", "gather", "scatter", "all_to_all", "broadcast"})
SMALL_OPERATIONS = frozenset({"all_reduce", "reduce_scatter", "all_gather"})


class SharedTransport(Transport):
    """The primitives among ranks that see each other's `memory`; what is not for it is done by `mpi`.

    `least` are the bytes from which on a sum is, `least_moved` those of other operations, `least_sent` of
    messages between two ranks, `seen` those from which on `empty` gives memory that others see;
    `round_bytes` of a tensor are copied, or added, before others learn of it. From `least_inline` up to
    `small_operation_bytes` what blocks is inline, if it is a sum; of other operations less, too.
    """

    least, least_moved, least_sent = SHARED_BYTES, MOVED_BYTES, MESSAGE_BYTES
    seen, round_bytes = SEEN_BYTES, ROUND_BYTES

    def __init__(self, mpi: MpiTransport, memory: NodeMemory) -> None:
        """Collective over the ranks of `mpi`."""
        self.mpi, self.memory = mpi, memory
        self.rank, self.size = mpi.rank, mpi.size
        self.sharers = mpi.size
        self.users: tuple[int, ...] = tuple(mpi.communicator.allgather(memory.rank))
        """The ranks, as in the world."""
        self.boards = ProgressCounters(mpi.communicator, memory)
        self.messages = NodeMessages(mpi.communicator, memory)
        self._lent = [0] * self.size  # bytes in common that each rank owns
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.least_inline = PAIR_BYTES if self.size == 2 else 0
        self.inline_bytes = small_operation_bytes(self.size)
        self._inline: SmallOperations | None = None
        self._under_way: list[SteppedWork | None] = [None] * SLOTS

    @override
    def run(self, call: Call) -> TransportWork | None:
        if call.operation == "barrier":
            return run_steps(memory_barrier(self.memory, self.mpi, call), call.blocking)
        common = call.output if call.operation == "all_gather" else None
        if common is not None and self.memory.is_common(common, self.users):
            return self.start(self._publish(call, common), call.blocking)
        if call.blocking and call.bytes <= self.inline_bytes and self._run_inline(call):
            return None
        if not self._is_ours(call):
            return self.mpi.run(call)
        if call.operation in MESSAGES:
            return self.messages.run(call)
        steps = self._reduce(call) if call.operation in REDUCTIONS else self._move(call)
        return self.start(steps, call.blocking)

    def start(self, steps: Steps, blocking: bool) -> TransportWork | None:
        """Run the steps of an operation that has a slot, or start them."""
        # An operation has a slot, and who comes round to one waits for what was there.
        place = self.boards.next
        before = self._under_way[place]
        if before is not None:
            before.wait()
            self._under_way[place] = None
        pending = run_steps(steps, blocking)
        if isinstance(pending, SteppedWork):
            self._under_way[place] = pending
        return pending

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See Transport. Memory that the others see, where there is any."""
        elements = torch.Size(shape).numel()
        seen = self.memory.empty(shape, dtype) if elements * dtype.itemsize >= self.seen else None
        return super().empty(shape, dtype, device) if seen is None else seen

    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:  # noqa: ARG002
        """See Transport. Of one rank's memory: of several such, each owns about as much."""
        size = length * dtype.itemsize
        owner = self._lent.index(min(self._lent))
        self._lent[owner] += size
        place = self.memory.lend(size, self.size) if owner == self.rank else None
        place = self.mpi.communicator.bcast(place, owner)
        return None if place is None else self.memory.common(place, length, dtype, self.users)

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        if elements * itemsize >= self.least:
            return 0
        return self.mpi.scratch_bytes(elements, itemsize, scattered)

    def adds_once(self, call: Call) -> bool:
        """See Transport. What may be inline every rank adds for itself."""
        if call.blocking and call.bytes <= self.inline_bytes:
            return False
        return self._is_ours(call) or self.mpi.adds_once(call)

    def _run_inline(self, call: Call) -> bool:
        """Do what a small call describes, if it is one for that, and there is memory for it."""
        operation, dtype = call.operation, call.dtype
        if operation not in SMALL_OPERATIONS or dtype is None:
            return False
        if operation in REDUCTIONS and not (dtype.is_floating_point and call.bytes >= self.least_inline):
            return False
        if self._inline is None:
            self._inline = open_small_operations(self.mpi.communicator, self.memory)
            if self._inline is None:
                self.inline_bytes = -1
                return False
        self._inline.run(call)
        return True

    def takes_message(self, call: Call) -> bool:
        """Whether it is a message that goes through memory, if both its ranks see it: the same on both."""
        return call.operation in MESSAGES and self.least_sent <= call.bytes <= MESSAGE_MOST_BYTES

    def _is_ours(self, call: Call) -> bool:
        """Whether a call goes through memory: the same on all ranks."""
        operation, dtype = call.operation, call.dtype
        if operation in REDUCTIONS:
            return call.bytes >= self.least and dtype is not None and dtype.is_floating_point
        if operation in MESSAGES:
            return self.takes_message(call)
        # Of uneven pieces that are exchanged no rank knows the total.
        return operation in MOVEMENTS and (call.bytes >= self.least_moved or call.received is not None)

    # Sums

    def _reduce(self, call: Call) -> Steps:
        tensor, operation = call.tensor, call.reduced
        assert tensor is not None and operation is not None
        whole = flat_view(tensor)
        if call.operation == "all_reduce":
            shares = equal_counts(whole.numel(), self.size)
            spans, output = ranges_of_ranks(shares, whole, self.size), None
        else:
            assert call.output is not None
            spans, output = ranges_of_ranks(call.counts, whole, self.size), flat_view(call.output)
        laid = self._lay(whole, spans, in_rounds=True)
        slot, (begin, count) = laid.slot, spans[self.rank]
        for turn in range(laid.rounds):
            yield slot.given(self._others, turn + 1)
            first = turn * laid.elements
            length = min(laid.elements, count - first)
            if length > 0:
                own = whole[begin + first : begin + first + length]
                into = own if output is None else output[first : first + length]
                places = [slot.pieces(peer).at(self.rank, turn) for peer in self._others]
                theirs = [self.memory.at(place, length, own.dtype) for place in places]
                self._add(own, theirs, into, operation, written=output is None)
            slot.finish(turn + 1)
            if laid.copies:
                yield slot.finished(self._others, turn + 1)
                if output is None:
                    laid.take_back(turn)
                laid.give(turn + STAGED_ROUNDS)
        slot.finish()
        yield slot.finished(self._others)
        laid.close()

    def _add(
        self, own: Tensor, theirs: Sequence[Tensor], into: Tensor, operation: Operation, written: bool
    ) -> None:
        """Reduce a piece of all ranks in rank order; sums that are `written` go over the others', too."""
        parts = [own, *theirs]
        parts = [parts[(rank - self.rank) % self.size] for rank in range(self.size)]
        spare = own.new_empty(min(BLOCK, len(own))) if self.rank > 1 else None
        for *blocks, result in zip(*(part.split(BLOCK) for part in (*parts, into)), strict=True):
            reduce_block(blocks, result, operation, self.rank, spare)
            for rank in self._others if written else ():
                blocks[rank].copy_(result)

    # Movement

    def _move(self, call: Call) -> Steps:
        given, sends, taken, receives = _spans(call, self.size)
        source, target = _octets(given), _octets(taken)
        (begin, count), (position, _) = sends[self.rank], receives[self.rank]
        if count and source.data_ptr() + begin != target.data_ptr() + position:
            target[position : position + count].copy_(source[begin : begin + count])
        laid = self._lay(source, sends, in_rounds=False)
        slot = laid.slot
        left = {peer: receives[peer] for peer in self._others if receives[peer][1]}
        turn = 0
        while left or turn < laid.rounds:
            yield slot.given(left, turn + 1)
            for peer, (start, length) in list(left.items()):
                pieces = slot.pieces(peer)
                first = turn * pieces.elements
                last = min(first + pieces.elements, length)
                part, place = target[start + first : start + last], pieces.at(self.rank, turn)
                if self.memory.find(part) != place:  # else it is one memory, where nothing has to move
                    part.copy_(self.memory.at(place, last - first, torch.uint8))
                if last == length:
                    del left[peer]
            turn += 1
            slot.finish(turn if left else ROUNDS)
            if laid.copies and turn + 1 < laid.rounds:
                yield slot.finished(self._others, turn)
                laid.give(turn + 1)
        slot.finish()
        yield slot.finished(self._others)
        laid.close()

    def _publish(self, call: Call, common: Tensor) -> Steps:
        """Gather where all others have what they give: wait until all have written."""
        assert call.tensor is not None
        begin, count = ranges_of_ranks(call.counts, common, self.size)[self.rank]
        own = flat_view(common)[begin : begin + count]
        if own.data_ptr() != call.tensor.data_ptr():
            own.copy_(flat_view(call.tensor))
        slot = self.boards.open()
        slot.finish()
        yield slot.finished(self._others)

    def _lay(self, tensor: Tensor, spans: Sequence[ElementRange], in_rounds: bool) -> _Laid:
        return _Laid(self.boards.open(), self.memory, self.rank, tensor, spans, self.round_bytes, in_rounds)


class _Laid:
    """A rank's spans of a tensor for all, laid open round by round in a slot; the first rounds at once.

    `copies` says whether the others see copies of them; what one rank has for itself is not among these.
    Where they see the tensor itself, it is one round, if not to be `in_rounds` that all ranks have alike.
    """

    def __init__(
        self,
        slot: OperationCounters,
        memory: NodeMemory,
        rank: int,
        tensor: Tensor,
        spans: Sequence[ElementRange],
        round_bytes: int,
        in_rounds: bool,
    ) -> None:
        self.slot, self._memory = slot, memory
        self._tensor, itemsize, size = tensor, tensor.itemsize, len(spans)
        alike, longest = len(set(spans)) == 1, max(count for _, count in spans)
        place = memory.find(tensor) if longest else MemoryLocation(memory.rank, 0)
        self.copies = place is None
        self.elements = max(1, round_bytes // itemsize // (1 if alike else size))
        if not (self.copies or in_rounds):
            self.elements = max(1, longest)
        self.rounds = -(-longest // self.elements)
        assert self.rounds < ROUNDS, (tensor.shape, self.rounds)
        self._staging: Tensor | None = None
        if place is None:
            self._staging = take_staging(memory)
            place = memory.find(self._staging)
            assert place is not None
            begins = [0 if alike else peer * self.elements for peer in range(size)]
            stride, turns = self._staging.nbytes // STAGED_ROUNDS, STAGED_ROUNDS
            copied = self._staging.view(tensor.dtype)
            self._room = copied[: len(copied) // STAGED_ROUNDS], copied[len(copied) // STAGED_ROUNDS :]
            others = [peer for peer in range(size) if peer != rank]
            self._moved = [(spans[peer], begins[peer]) for peer in (others[:1] if alike else others)]
        else:
            begins, stride, turns = [begin for begin, _ in spans], self.elements * itemsize, ROUNDS
        slot.lay(PieceLayout(place, self.elements, stride, turns, [begin * itemsize for begin in begins]))
        if not self.copies:
            slot.give(self.rounds)
        for turn in range(min(STAGED_ROUNDS, self.rounds) if self.copies else 0):
            self.give(turn)

    def give(self, turn: int) -> None:
        """Copy a round to where the others see it, if there is one; its room is free."""
        if turn < self.rounds:
            for part, copied in self._pairs(turn):
                copied.copy_(part)
            self.slot.give(turn + 1)

    def take_back(self, turn: int) -> None:
        """Copy what the others have made of a round to where the tensor is."""
        for part, copied in self._pairs(turn):
            part.copy_(copied)

    def close(self) -> None:
        """All are done with it."""
        if self._staging is not None:
            self._memory.staging.append(self._staging)

    def _pairs(self, turn: int) -> Iterator[tuple[Tensor, Tensor]]:
        first = turn * self.elements
        for (begin, count), start in self._moved:
            length = min(self.elements, count - first)
            if length > 0:
                part = self._tensor[begin + first : begin + first + length]
                yield part, self._room[turn % STAGED_ROUNDS][start : start + length]


def take_staging(memory: NodeMemory) -> Tensor:
    """Memory to copy through, to be given back to those that the node's memory keeps."""
    if memory.staging:
        return memory.staging.pop()
    made = memory.empty((STAGED_ROUNDS * ROUND_BYTES,), torch.uint8)
    if made is None:
        raise MemoryError("the node has no memory left to copy through")
    return made


def memory_barrier(memory: NodeMemory, mpi: MpiTransport, call: Call) -> Steps:
    """A barrier, before which all has been read and written that was to be."""
    memory.fence()
    yield mpi.run(call)
    memory.fence()


def _octets(tensor: Tensor) -> Tensor:
    return flat_view(tensor).view(torch.uint8)


def _spans(call: Call, size: int) -> tuple[Tensor, list[ElementRange], Tensor, list[ElementRange]]:
    """As `pairwise_ranges`, in bytes, and of a broadcast, too."""
    if call.operation == "broadcast":
        tensor = call.memory
        assert tensor is not None
        source = target = tensor
        given = call.tensor is not None
        sends = [(0, tensor.numel() if given else 0)] * size
        receives = [(0, 0 if given or peer != call.root else tensor.numel()) for peer in range(size)]
    else:
        source, sends, target, receives = pairwise_ranges(call, size)

    def octets(spans: Sequence[ElementRange], itemsize: int) -> list[ElementRange]:
        return [(begin * itemsize, count * itemsize) for begin, count in spans]

    return source, octets(sends, source.itemsize), target, octets(receives, target.itemsize)
