"""What the ranks of a group write down for each other in the memory of their node.

Every rank has a board, on which it alone writes. An operation has a slot there: where the rank's pieces of it
lie, how many rounds of them are given, and how many rounds of everybody's it is done with. Both counts only
grow, over all operations that a slot ever has: who reads one late sees at least what it waits for, and a
board may serve another group once its own is gone.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.transport import wait_until
from hpctrain.host.mpi_library import MPI

SLOTS = 32
"""Operations of a group that may be under way at once."""

_BITS = 20  # of a count are the rounds of an operation, those above the operations before it
ROUNDS = (1 << _BITS) - 1  # more than an operation has
_LINE = 8  # words that processors hand each other together
_PATIENCE = 8  # looks in vain after which messages are helped along with every further one
_GIVEN, _DONE, _PLACE, _STARTS = 0, _LINE, 2 * _LINE, 3 * _LINE


class PieceLayout(NamedTuple):
    """Where a rank's pieces of an operation lie: that for rank r begins `starts[r]` bytes behind the place.

    Each is read in rounds of `elements`; that of round i begins (i mod `turns`) * `stride` bytes further on.
    """

    place: MemoryLocation
    elements: int
    stride: int
    turns: int
    starts: Sequence[int]

    def at(self, rank: int, turn: int) -> MemoryLocation:
        """Where the piece for a rank begins in a round."""
        return MemoryLocation(
            self.place.owner, self.place.offset + self.starts[rank] + turn % self.turns * self.stride
        )


class CounterWork:
    """A Pending: certain numbers on boards are at least as large as they are waited for to be.

    Who looks in vain for long helps this rank's messages along: those who are waited for may wait for these.
    """

    __slots__ = ("_left", "_looks", "_memory")

    def __init__(self, left: list[tuple[memoryview, int, int]], memory: NodeMemory) -> None:
        self._left, self._memory, self._looks = left, memory, 0

    def test(self) -> bool:
        """Let the operation make progress. Return True if it is complete."""
        left = self._left
        while left:
            board, word, least = left[-1]
            if board[word] < least:
                self._looks += 1
                if self._looks > _PATIENCE:
                    self._memory.progress()
                return False
            left.pop()
        self._memory.fence()
        return True

    def wait(self) -> None:
        """Wait until the operation is complete."""
        wait_until(self.test)


class ProgressCounters:
    """Those of a group's ranks, as this one sees them."""

    def __init__(self, communicator: MPI.Intracomm, memory: NodeMemory) -> None:
        """Collective over the group. MemoryError where the system has no memory for one."""
        self.rank, self.size = communicator.rank, communicator.size
        self.memory = memory
        self._words = _STARTS + -(-self.size // _LINE) * _LINE
        count = self._words * SLOTS
        free = memory.boards.setdefault(count, [])
        offset, first = free.pop() if free else (memory.take(8 * count), 0)
        if offset is None:
            raise MemoryError("no memory of the node is left for what its ranks tell each other")
        self._operations = [first]
        told = communicator.allgather((memory.rank, offset, first))
        self._boards = [memory.words(MemoryLocation(owner, start), count) for owner, start, _ in told]
        self._ahead = [of_rank - first for _, _, of_rank in told]
        weakref.finalize(self, _keep, free, offset, self._operations).atexit = False

    @property
    def next(self) -> int:
        """Which of the slots the next operation has: that of the one SLOTS operations before it."""
        return (self._operations[0] + 1) % SLOTS

    def open(self) -> OperationCounters:
        """The slot of the next operation, which is the next one on all ranks."""
        begin = self.next * self._words
        self._operations[0] = number = self._operations[0] + 1
        boards = [board[begin : begin + self._words] for board in self._boards]
        return OperationCounters(
            self.rank, boards, [(number + ahead) << _BITS for ahead in self._ahead], self.memory
        )


def _keep(free: list[tuple[int, int]], offset: int, operations: list[int]) -> None:
    """Keep a board for a group to come, whose first operation has the first slot, as all boards' have."""
    free.append((offset, -(-operations[0] // SLOTS) * SLOTS))


class OperationCounters:
    """One operation on the boards of all ranks. Ranks are those of the group."""

    def __init__(
        self, rank: int, boards: Sequence[memoryview], begun: Sequence[int], memory: NodeMemory
    ) -> None:
        self._own, self._boards, self._begun, self._memory = boards[rank], boards, begun, memory
        self._mine = begun[rank]

    def lay(self, pieces: PieceLayout) -> None:
        """Write down where this rank's pieces lie, before the first round of them is given."""
        own = self._own
        own[_PLACE : _PLACE + 5] = array("q", [*pieces.place, pieces.elements, pieces.stride, pieces.turns])
        own[_STARTS : _STARTS + len(pieces.starts)] = array("q", pieces.starts)

    def give(self, rounds: int) -> None:
        """So many rounds of this rank's pieces are there for the others."""
        self._memory.fence()
        self._own[_GIVEN] = self._mine + rounds

    def finish(self, rounds: int = ROUNDS) -> None:
        """This rank has read, and written, what it has to of so many rounds; without a number, of all."""
        self._memory.fence()
        self._own[_DONE] = self._mine + rounds

    def pieces(self, rank: int) -> PieceLayout:
        """Those of a rank that has given a round."""
        board = self._boards[rank]
        owner, offset, elements, stride, turns = board[_PLACE : _PLACE + 5]
        starts = board[_STARTS : _STARTS + len(self._boards)].tolist()
        return PieceLayout(MemoryLocation(owner, offset), elements, stride, turns, starts)

    def given(self, ranks: Iterable[int], rounds: int) -> CounterWork:
        """Until these have given so many rounds."""
        return self._reached(ranks, _GIVEN, rounds)

    def finished(self, ranks: Iterable[int], rounds: int = ROUNDS) -> CounterWork:
        """Until these are done with so many rounds."""
        return self._reached(ranks, _DONE, rounds)

    def _reached(self, ranks: Iterable[int], word: int, rounds: int) -> CounterWork:
        return CounterWork([(self._boards[r], word, self._begun[r] + rounds) for r in ranks], self._memory)
