"""Mailbox: letters between ranks that do different things, taken as they come, from whoever sends.

A letter is some numbers, and perhaps tensors, whose shapes the receiver knows from the numbers. Those of one
rank to another arrive in their order. All travels as messages of a Group of their own, so that the ledger
counts it where it is sent. Who waits here for letters gives no sign of life: if all ranks wait, the run
hangs, and its watchdog says so; while one of them computes, it does not.
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
from hpctrain.comm.transports.shared import MESSAGE_BYTES
from hpctrain.comm.work import Work
from hpctrain.host.mpi_library import MPI, communicator_of

LONGEST_PAUSE = 0.5e-3
"""Seconds between two looks for letters, while none comes."""

_NUMBERS, _TENSORS = 0, 1  # tags


@dataclass(frozen=True)
class MailboxHeader:
    """What came from rank `sender` of the group; the tensors that follow are to be received next."""

    sender: int
    numbers: tuple[float, ...]


class Mailbox:
    """This rank's letters to and from the others of `group`, of which nobody else makes use.

    What is sent is under way until `settled`: tensors must not change until then, and numbers are fp64.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        group.comparer = None  # which letter comes next, no rank can know
        self._communicator = communicator_of(group.objects)
        self.received = 0
        """Bytes that came; the ledger counts what is sent."""
        self._sending: dict[int, list[Work[Any]]] = {rank: [] for rank in range(group.size)}

    def send(self, receiver: int, numbers: Sequence[float], *tensors: Tensor) -> None:
        """Start to send a letter, and the tensors behind it."""
        letter = torch.tensor(numbers, dtype=torch.float64)
        if letter.nbytes >= MESSAGE_BYTES:
            raise ValueError(f"a letter of {len(numbers)} numbers is too long for one MPI message")
        self._sending[receiver].append(self.group.start_send(letter, receiver, _NUMBERS))
        self.hand(receiver, *tensors)

    def hand(self, receiver: int, *tensors: Tensor) -> None:
        """Start to send tensors that the receiver knows will come; none where there are no elements."""
        self.settled(receiver)
        sending = [self.group.start_send(each, receiver, _TENSORS) for each in tensors if each.numel()]
        self._sending[receiver] += sending

    def settled(self, receiver: int | None = None) -> bool:
        """Whether all that was sent, or that to one rank, has left this one's memory; helps it along."""
        for rank in self._sending if receiver is None else (receiver,):
            self._sending[rank] = [work for work in self._sending[rank] if not work.test()]
            if self._sending[rank]:
                return False
        return True

    def settle(self) -> None:
        """Wait until all that was sent has left this rank's memory."""
        for works in self._sending.values():
            for work in works:
                work.wait()
            works.clear()

    def look(self) -> MailboxHeader | None:
        """The next letter of any rank, if there is one."""
        status = MPI.Status()
        if not self._communicator.Iprobe(MPI.ANY_SOURCE, _NUMBERS, status):
            return None
        sender = status.Get_source()
        numbers = torch.empty(status.Get_count(MPI.DOUBLE), dtype=torch.float64)
        self.received += numbers.nbytes
        return MailboxHeader(sender, tuple(self.group.recv(numbers, sender, _NUMBERS).tolist()))

    def take(self, meanwhile: Callable[[], object] = lambda: None) -> MailboxHeader:
        """Wait for the next letter of any rank; `meanwhile` is called again and again until one comes."""
        letter = self.look()
        if letter is not None:
            return letter
        calls, began, pause = self.group.ledger.calls, time.perf_counter(), 1e-5
        call = Call("wait for letters")
        call.group, call.number = self.group.calls, 0
        try:
            while letter is None:
                calls.waits, calls.current = began, call
                self.settled()
                meanwhile()
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                letter = self.look()
        finally:
            calls.current = None
        return letter

    def receive(self, sender: int, tensor: Tensor) -> Tensor:
        """The next tensor of a letter of `sender`, into all of `tensor`; itself."""
        self.received += tensor.nbytes
        return self.group.recv(tensor, sender, _TENSORS) if tensor.numel() else tensor
