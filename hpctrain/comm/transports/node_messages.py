"""Messages between two ranks of a node: MPI carries where they lie, and the receiver takes them from there.

A large message of MPI's own waits, where the system lets no process read another one's memory (as most
containers do not), until its sender is in MPI again, which computes meanwhile. Here a sender copies it to a
block that all see, unless it lies in such memory already, and goes on: a note of some bytes is under way at
once, and MPI brings notes in the order, and under the tags, of what they stand for.
"""

from __future__ import annotations

from array import array

import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.mpi import MpiRequests, address, flat_view
from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.progress_counters import CounterWork
from hpctrain.comm.transports.transport import Steps, TransportWork, run_steps
from hpctrain.host.mpi_library import MPI

_HEAD = 64  # bytes of a block before what it holds: so much processors hand each other together
_SPARE = 4  # blocks that nobody uses, which are kept for messages to come
_WORDS = 5  # of a note


class MessageBuffer:
    """Memory that the ranks of a node see, which a message may lie in. `room` are its bytes.

    Its first word counts the messages that were taken of those that it stood for: who takes one writes it.
    """

    def __init__(self, memory: NodeMemory, room: int) -> None:
        """MemoryError where the system has no more."""
        whole = memory.empty((_HEAD + room,), torch.uint8)
        place = None if whole is None else memory.find(whole)
        if whole is None or place is None:
            raise MemoryError("the node has no memory left for messages")
        self.place, self.room = place, room
        self.octets = whole[_HEAD:]
        self.sent = 0
        self._taken = memory.words(place, 1)
        self._taken[0] = 0

    @property
    def free(self) -> bool:
        """Whether all that it stood for is taken."""
        return self._taken[0] >= self.sent

    def taken(self, memory: NodeMemory) -> CounterWork:
        """Until it is."""
        return CounterWork([(self._taken, 0, self.sent)], memory)


class NodeMessages:
    """Those of the ranks of a communicator, which see each other's `memory`."""

    def __init__(self, communicator: MPI.Intracomm, memory: NodeMemory) -> None:
        self._communicator, self._memory = communicator, memory

    def run(self, call: Call) -> TransportWork | None:
        """See Transport, of a call that sends or receives."""
        return run_steps(self._send(call) if call.operation == "send" else self._receive(call), call.blocking)

    def _send(self, call: Call) -> Steps:
        """See Group.start_send. A tensor that the others see is the sender's again when it is taken, another
        one as soon as it is copied.
        """
        tensor, memory = call.tensor, self._memory
        assert tensor is not None
        place = memory.find(tensor)
        block = self._block(0 if place is not None else tensor.nbytes)
        copied = place is None
        if place is None:
            place = MemoryLocation(block.place.owner, block.place.offset + _HEAD)
            block.octets[: tensor.nbytes].copy_(flat_view(tensor).view(torch.uint8))
        block.sent += 1
        note = array("q", [*place, *block.place, block.sent])
        memory.fence()
        yield _Note(self._communicator.Isend(_buffer(note), call.peer, call.tag), note)
        if not copied:
            yield block.taken(memory)

    def _receive(self, call: Call) -> Steps:
        """Receive a message, as `Group.start_recv` promises."""
        output, memory = call.output, self._memory
        assert output is not None
        note = array("q", [0] * _WORDS)
        yield _Note(self._communicator.Irecv(_buffer(note), call.peer, call.tag), note)
        memory.fence()
        owner, offset, of_block, head, number = note
        lying = memory.at(MemoryLocation(owner, offset), output.nbytes, torch.uint8)
        flat_view(output).view(torch.uint8).copy_(lying)
        memory.fence()
        memory.words(MemoryLocation(of_block, head), 1)[0] = number

    def _block(self, room: int) -> MessageBuffer:
        """One that nobody uses, with room for so many bytes, but not for many more."""
        blocks = self._memory.blocks
        free = [block for block in blocks if block.free]
        fitting = [block for block in free if room <= block.room <= 2 * room]
        if fitting:
            self._memory.fence()
            return min(fitting, key=lambda block: block.room)
        for block in free[_SPARE - 1 :]:
            blocks.remove(block)
        blocks.append(MessageBuffer(self._memory, room))
        return blocks[-1]


class _Note(MpiRequests):
    """A note under way, which stays until it has arrived."""

    __slots__ = ("_note",)

    def __init__(self, request: MPI.Request, note: array[int]) -> None:
        super().__init__([request])
        self._note = note


def _buffer(note: array[int]) -> tuple[MPI.buffer, int, MPI.Datatype]:
    begin, count = note.buffer_info()
    return address(begin, count * note.itemsize), count, MPI.INT64_T
