"""Messages between two ranks of a node: MPI sends the location of the data, and the receiver copies the data.

If the system does not allow processes to read each other's memory, as in most containers, a large MPI message
waits until its sender is in MPI again, while the sender computes. Here the sender copies the data to memory
that all ranks see, unless it is there already, and goes on. MPI carries a small note at once. Notes arrive
with the tags and in the order of the messages that they stand for.
"""

from __future__ import annotations

from array import array

import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.mpi import MpiRequests
from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.progress_counters import CounterWork
from hpctrain.comm.transports.transport import Steps, TransportWork, flat_view, run_steps
from hpctrain.host.mpi_library import MPI

_HEADER_BYTES = 64  # bytes of a cache line, which hold the counter of a buffer
_SPARE_BUFFERS = 4  # unused buffers that are kept for later messages
_NOTE_WORDS = 5  # owner and offset of the data and of the buffer, number of the buffer's message


class MessageBuffer:
    """Memory of this rank that all ranks of the node see, for the data of one message at a time.

    Its first word counts the messages that were received of those that used it. The receiver writes it.

    Args:
        memory: Memory of the node.
        capacity: Number of bytes of data.

    Raises:
        MemoryError: The system has no memory left.
    """

    def __init__(self, memory: NodeMemory, capacity: int) -> None:
        tensor = memory.empty((_HEADER_BYTES + capacity,), torch.uint8)
        location = None if tensor is None else memory.find(tensor)
        if tensor is None or location is None:
            raise MemoryError("the node has no memory left for messages")
        self.location, self.capacity = location, capacity
        self.data = tensor[_HEADER_BYTES:]
        self.sent = 0
        self._received = memory.words(location, 1)
        self._received[0] = 0

    @property
    def free(self) -> bool:
        """True if all messages that used the buffer were received."""
        return self._received[0] >= self.sent

    def until_received(self, memory: NodeMemory) -> CounterWork:
        """Return a handle that is complete when all messages sent so far with this buffer were received.

        Local.

        Args:
            memory: Memory of the node.
        """
        return CounterWork([(self._received, 0, self.sent)], memory)


class NodeMessages:
    """Messages between ranks of a communicator that see each other's memory."""

    def __init__(self, communicator: MPI.Intracomm, memory: NodeMemory) -> None:
        self._communicator, self._memory = communicator, memory

    def run(self, call: Call) -> TransportWork | None:
        """Run or start a "send" or "recv" between ranks of this node.

        Local: one call on each of the two ranks. A tensor that is in memory of the node is not copied: its
        send is complete when the receiver has it, so two ranks that both send with blocking first may wait
        for each other forever. Any other tensor is copied at once, and its send does not wait for the
        receiver.

        Args:
            call: The call, with its tensors in host memory.

        Returns:
            None if the call is blocking: a receive has arrived then, and the tensor of a send may be changed.
            Otherwise the handle of the started operation, for which the same holds when it is complete.

        Raises:
            MemoryError: The node has no memory left for the copy of a sent tensor.
        """
        steps = self._send(call) if call.operation == "send" else self._receive(call)
        return run_steps(steps, call.blocking)

    def _send(self, call: Call) -> Steps:
        """Send a tensor. If the receiver sees it, it must not change until it was received."""
        tensor, memory = call.tensor, self._memory
        assert tensor is not None
        location = memory.find(tensor)
        buffer = self._free_buffer(0 if location is not None else tensor.nbytes)
        copied = location is None
        if location is None:
            location = MemoryLocation(buffer.location.owner, buffer.location.offset + _HEADER_BYTES)
            buffer.data[: tensor.nbytes].copy_(flat_view(tensor).view(torch.uint8))
        buffer.sent += 1
        note = array("q", [*location, *buffer.location, buffer.sent])
        memory.fence()
        yield MpiRequests([self._communicator.Isend([note, MPI.INT64_T], call.peer, call.tag)])
        if not copied:
            yield buffer.until_received(memory)

    def _receive(self, call: Call) -> Steps:
        output, memory = call.output, self._memory
        assert output is not None
        note = array("q", [0] * _NOTE_WORDS)
        yield MpiRequests([self._communicator.Irecv([note, MPI.INT64_T], call.peer, call.tag)])
        memory.fence()
        owner, offset, buffer_owner, buffer_offset, number = note
        data = memory.tensor_at(MemoryLocation(owner, offset), output.nbytes, torch.uint8)
        flat_view(output).view(torch.uint8).copy_(data)
        memory.fence()
        memory.words(MemoryLocation(buffer_owner, buffer_offset), 1)[0] = number

    def _free_buffer(self, size: int) -> MessageBuffer:
        """Return an unused buffer with a capacity between `size` and twice as many bytes."""
        buffers = self._memory.message_buffers
        free = [buffer for buffer in buffers if buffer.free]
        fitting = [buffer for buffer in free if size <= buffer.capacity <= 2 * size]
        if fitting:
            self._memory.fence()
            return min(fitting, key=lambda buffer: buffer.capacity)
        for buffer in free[_SPARE_BUFFERS - 1 :]:
            buffers.remove(buffer)
        buffers.append(MessageBuffer(self._memory, size))
        return buffers[-1]
