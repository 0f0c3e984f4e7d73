"""Counters in the memory of a node by which ranks tell each other how far they are in an operation.

Each rank of a group has a row of counters that only it writes. An operation uses one slot of the row. There
the rank writes where its pieces are, how many rounds of them are ready for the others, and how many rounds it
has finished. Both counts only grow, over all operations that ever use a slot. So a rank that reads a count
late sees at least the value that it waits for, and a later group may use the row once the group is gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.transport import wait_until
from hpctrain.host.mpi_library import MPI

SLOTS = 32
"""Number of operations of a group that may be in flight at once. The next one first waits for the oldest."""

_ROUND_BITS = 20
"""Low bits of a count, which are the rounds of the current operation. The high bits count operations."""

ROUNDS = (1 << _ROUND_BITS) - 1
"""Number that is larger than the rounds of any operation."""

COPY_ROUND_BYTES = 4 << 20
"""Bytes of a tensor that are copied in one round."""

STAGED_ROUNDS = 2
"""Rounds for which a rank has memory through which it copies."""

_LINE = 8  # words of 64 bits in a cache line
_TESTS_BEFORE_HELP = 8  # after so many unsuccessful tests, each further one also calls `NodeMemory.progress`
_READY, _FINISHED, _LOCATION, _OFFSETS = 0, _LINE, 2 * _LINE, 3 * _LINE


class PieceLayout(NamedTuple):
    """Addresses of the pieces of a rank's tensor, one piece for each rank of the group.

    Attributes:
        location: Location to which the offsets are relative.
        elements: Number of elements of a piece in one round.
        is_copy: True if pieces are copied round by round. The copy of round i starts (i mod STAGED_ROUNDS) *
            COPY_ROUND_BYTES bytes after that of the first one.
        offsets: Offset in bytes of the piece of the first round for each rank.
    """

    location: MemoryLocation
    elements: int
    is_copy: bool
    offsets: Sequence[int]

    def at(self, rank: int, index: int) -> MemoryLocation:
        """Return where the piece of this tensor for a rank starts. Local.

        Args:
            rank: Rank of the group that the piece is for.
            index: Number of the round, from 0. It matters only if pieces are copied; otherwise the result is
                always the start of the piece of the first round.
        """
        later = index % STAGED_ROUNDS * COPY_ROUND_BYTES if self.is_copy else 0
        return MemoryLocation(self.location.owner, self.location.offset + self.offsets[rank] + later)


class CounterWork:
    """Handle that is complete when certain counters have reached their values.

    After some unsuccessful tests it also lets this rank's MPI messages make progress, since the ranks that it
    waits for may wait for these.

    Args:
        remaining: For each counter its memory, its index there, and the value to wait for.
        memory: Memory of the node.
    """

    __slots__ = ("_memory", "_remaining", "_tests")

    def __init__(self, remaining: list[tuple[memoryview, int, int]], memory: NodeMemory) -> None:
        self._remaining, self._memory, self._tests = remaining, memory, 0

    def test(self) -> bool:
        """Return True if all counters have reached their values. It never blocks.

        What their ranks wrote before is then visible. After some unsuccessful tests, each further one also
        lets this rank's MPI messages make progress.
        """
        remaining = self._remaining
        while remaining:
            counters, index, value = remaining[-1]
            if counters[index] < value:
                self._tests += 1
                if self._tests > _TESTS_BEFORE_HELP:
                    self._memory.progress()
                return False
            remaining.pop()
        self._memory.fence()
        return True

    def wait(self) -> None:
        """Wait until all counters have reached their values."""
        wait_until(self.test)


class ProgressCounters:
    """Counters of all ranks of a group, as this rank sees them. The constructor is collective.

    Args:
        communicator: Communicator of the group.
        memory: Memory of the node, to which all ranks belong.

    Raises:
        MemoryError: The system has no memory left.
    """

    def __init__(self, communicator: MPI.Intracomm, memory: NodeMemory) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.memory = memory
        self.peers = [peer for peer in range(self.size) if peer != self.rank]
        self._slot_words = _OFFSETS + -(-self.size // _LINE) * _LINE
        count = _LINE + self._slot_words * SLOTS
        offset = memory.reuse(("counters", count), 8 * count, self)
        if offset is None:
            raise MemoryError("no memory of the node is left for the counters of its ranks")
        # The first word of a row counts its operations. The first one of a group uses the first slot.
        self._count = memory.words(MemoryLocation(memory.rank, offset), 1)
        self._count[0] = first = -(-self._count[0] // SLOTS) * SLOTS
        rows = communicator.allgather((memory.rank, offset, first))
        self._rows = [memory.words(MemoryLocation(owner, start), count) for owner, start, _ in rows]
        self._ahead = [first_of_rank - first for _, _, first_of_rank in rows]

    @property
    def next_slot(self) -> int:
        """Number of the slot that `open` uses next, from 0 to SLOTS - 1. Reading it changes nothing."""
        return (self._count[0] + 1) % SLOTS

    def open(self) -> OperationCounters:
        """Return the counters of the next operation.

        Local, but all ranks open their operations in the same order. Operations use SLOTS slots in turn. So
        the operation that was opened SLOTS operations before must be complete on this rank. This is not
        checked: otherwise both would count in the same slot, and ranks would read data that is not ready.
        """
        begin = _LINE + self.next_slot * self._slot_words
        self._count[0] = number = self._count[0] + 1
        slots = [row[begin : begin + self._slot_words] for row in self._rows]
        bases = [(number + ahead) << _ROUND_BITS for ahead in self._ahead]
        return OperationCounters(self.rank, slots, bases, self.memory)


class OperationCounters:
    """Counters of one operation on all ranks of a group. All methods are local.

    Args:
        rank: This rank in the group.
        slots: Words of each rank's slot.
        bases: Values of each rank's counts at the start of the operation.
        memory: Memory of the node.
    """

    def __init__(
        self, rank: int, slots: Sequence[memoryview], bases: Sequence[int], memory: NodeMemory
    ) -> None:
        self._slot, self._base = slots[rank], bases[rank]
        self._slots, self._bases, self._memory = slots, bases, memory

    def set_layout(self, layout: PieceLayout) -> None:
        """Write for the other ranks where this rank's pieces are.

        Call it once, before the first `set_ready`, which makes it visible to the other ranks.
        """
        slot = self._slot
        slot[_LOCATION : _LOCATION + 4] = array("q", [*layout.location, layout.elements, layout.is_copy])
        slot[_OFFSETS : _OFFSETS + len(layout.offsets)] = array("q", layout.offsets)

    def layout_of(self, rank: int) -> PieceLayout:
        """Return the addresses of the pieces of a rank's tensor, as that rank wrote them with `set_layout`.

        It does not wait. Before the call, the handle that `until_ready` has returned for any round of that
        rank must be complete: its `wait` has returned, or its `test` was True. Otherwise the result is
        meaningless. The pieces of a round may be used until this rank calls `set_finished` for that round.

        Args:
            rank: Number of another rank in the group.
        """
        slot = self._slots[rank]
        owner, offset, elements, is_copy = slot[_LOCATION : _LOCATION + 4]
        offsets = slot[_OFFSETS : _OFFSETS + len(self._slots)].tolist()
        return PieceLayout(MemoryLocation(owner, offset), elements, bool(is_copy), offsets)

    def set_ready(self, rounds: int) -> None:
        """Tell the other ranks that the first `rounds` rounds of this rank's pieces are ready for them.

        All writes of this rank before this call are visible to ranks that see the count.
        """
        self._memory.fence()
        self._slot[_READY] = self._base + rounds

    def set_finished(self, rounds: int = ROUNDS) -> None:
        """Tell the other ranks that this one has finished its first `rounds` rounds, by default all.

        It neither reads nor writes their pieces of these rounds any more.
        """
        self._memory.fence()
        self._slot[_FINISHED] = self._base + rounds

    def until_ready(self, ranks: Iterable[int], rounds: int) -> CounterWork:
        """Return a handle that is complete when each of these ranks has made its first `rounds` rounds ready.

        Args:
            ranks: Ranks of the group.
            rounds: Number of rounds.
        """
        return self._until(ranks, _READY, rounds)

    def until_finished(self, ranks: Iterable[int], rounds: int = ROUNDS) -> CounterWork:
        """Return a handle that is complete when each of these ranks has finished its first `rounds` rounds.

        Args:
            ranks: Ranks of the group.
            rounds: Number of rounds; by default all.
        """
        return self._until(ranks, _FINISHED, rounds)

    def _until(self, ranks: Iterable[int], index: int, rounds: int) -> CounterWork:
        return CounterWork([(self._slots[r], index, self._bases[r] + rounds) for r in ranks], self._memory)
