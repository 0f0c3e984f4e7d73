"""Messages between ranks with different roles, which a rank receives from whoever sends first.

A message is a header of numbers, and perhaps tensors whose shapes the receiver derives from the numbers.
Messages of one rank to another arrive in order. A mailbox has a Group of its own, whose entry in the ledger
counts the messages on the sender. Waiting for a message is no sign of life for the watchdog. So it ends the
run if all ranks wait, but not while one of them still computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.calls import Call
from hpctrain.comm.group import Group
from hpctrain.comm.transports.shared import LEAST_MESSAGE_BYTES
from hpctrain.comm.work import Work
from hpctrain.host.mpi_library import MPI, communicator_of

LONGEST_PAUSE = 0.5e-3
"""Longest time between two polls, in seconds."""

_NUMBERS, _TENSORS = 0, 1  # message tags of headers and of tensors


@dataclass(frozen=True)
class MailboxHeader:
    """Header of a received message. Its tensors must be received before the next message of that sender.

    Attributes:
        sender: Rank of the group.
        numbers: Numbers of the header.
    """

    sender: int
    numbers: tuple[float, ...]


class Mailbox:
    """Messages between this rank and the others of a group that nothing else uses.

    Sends are non-blocking: tensors must not change until `sends_complete` returns True. The constructor is
    local. It switches off the comparison of calls for the group.

    Attributes:
        received_bytes: Number of received bytes. The ledger counts sent bytes only.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        group.comparer = None  # ranks cannot compare calls, since they receive in any order
        self._communicator = communicator_of(group.objects)
        self.received_bytes = 0
        self._sending: dict[int, list[Work[Any]]] = {rank: [] for rank in range(group.size)}

    def send(self, receiver: int, numbers: Sequence[float], *tensors: Tensor) -> None:
        """Start to send a message, after which this returns at once. Local.

        Earlier sends to the same receiver make progress. Completed ones are forgotten.

        Args:
            receiver: Rank of the group.
            numbers: Header of the message, sent in fp64, so that integers are exact up to 2^53; fewer than
                LEAST_MESSAGE_BYTES / 8 numbers.
            tensors: Tensors that follow the header, copied if they are not contiguous, which must not change
                until `sends_complete(receiver)` returns True. Empty ones are not sent.

        Raises:
            ValueError: The header has more numbers than one MPI message of this kind may have.
        """
        header = torch.tensor(numbers, dtype=torch.float64)
        if header.nbytes >= LEAST_MESSAGE_BYTES:
            raise ValueError(f"a header of {len(numbers)} numbers is too long for one MPI message")
        self._sending[receiver].append(self.group.start_send(header, receiver, _NUMBERS))
        self.send_tensors(receiver, *tensors)

    def send_tensors(self, receiver: int, *tensors: Tensor) -> None:
        """Start to send tensors without the header of numbers that `send` sends first. Local; does not wait.

        The receiver must know from earlier messages that these tensors come, and their shapes and dtypes. It
        receives them one by one with `receive_tensor`, in this order, after all tensors that were sent to it
        before, also those of `send`. Large ones may move only while this rank waits for messages or calls
        `sends_complete` or `wait_for_sends`.

        Args:
            receiver: Rank of the group.
            tensors: Tensors, which must not change until `sends_complete(receiver)` returns True. Empty ones
                are not sent, and `receive_tensor` does not wait for them.
        """
        self.sends_complete(receiver)
        sending = [self.group.start_send(each, receiver, _TENSORS) for each in tensors if each.numel()]
        self._sending[receiver] += sending

    def sends_complete(self, receiver: int | None = None) -> bool:
        """Let sends make progress, and return True if all tensors that were sent may be changed again. Local.

        It does not wait. True does not mean that the receiver has received them.

        Args:
            receiver: Rank of the group to which the sends go; None for the sends to all ranks.
        """
        for rank in self._sending if receiver is None else (receiver,):
            self._sending[rank] = [work for work in self._sending[rank] if not work.test()]
            if self._sending[rank]:
                return False
        return True

    def wait_for_sends(self) -> None:
        """Wait until all tensors that were sent to any rank may be changed again. Local."""
        for works in self._sending.values():
            for work in works:
                work.wait()
            works.clear()

    def poll(self) -> MailboxHeader | None:
        """Receive the header of the next message of any rank, if one has arrived. Local; does not wait.

        Returns:
            Sender and numbers of the header; None if none has arrived. The caller receives the message's
            tensors with `receive_tensor` before it receives the next header of that sender. Otherwise it gets
            them in place of the tensors of later messages, since they arrive in the order of sending.
        """
        status = MPI.Status()
        if not self._communicator.Iprobe(MPI.ANY_SOURCE, _NUMBERS, status):
            return None
        sender = status.Get_source()
        numbers = torch.empty(status.Get_count(MPI.DOUBLE), dtype=torch.float64)
        self.received_bytes += numbers.nbytes
        return MailboxHeader(sender, tuple(self.group.recv(numbers, sender, _NUMBERS).tolist()))

    def wait_for_header(self, meanwhile: Callable[[], object] = lambda: None) -> MailboxHeader:
        """Wait for the next message of any rank, and return its header. Local. Sends make progress meanwhile.

        Args:
            meanwhile: Function that is called again and again during the wait.
        """
        header = self.poll()
        if header is not None:
            return header
        calls, start, pause = self.group.ledger.calls, time.perf_counter(), 1e-5
        call = Call("wait for messages")
        call.group, call.number = self.group.calls, 0
        try:
            while header is None:
                calls.waiting_since, calls.current = start, call
                self.sends_complete()
                meanwhile()
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                header = self.poll()
        finally:
            calls.current = None
        return header

    def receive_tensor(self, sender: int, tensor: Tensor) -> Tensor:
        """Wait for the next tensor of `sender`, receive it into `tensor`, and return `tensor`. Local.

        An empty tensor is returned at once, since it is not sent. MPI may send this rank's own messages
        meanwhile.

        Args:
            sender: Rank of the group.
            tensor: Contiguous tensor with as many elements and the same dtype as the tensor that is sent,
                which is not checked.
        """
        self.received_bytes += tensor.nbytes
        return self.group.recv(tensor, sender, _TENSORS) if tensor.numel() else tensor
