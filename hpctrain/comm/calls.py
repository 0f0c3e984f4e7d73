"""Call, the description of one operation of a group, and the log of this rank's calls.

The log costs less than a microsecond per call. The thread that communicates writes it, and the watchdog's
thread reads it while the first one may hang. So reading never waits, and may miss the newest call.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "max", "min"]

RECENT_CALLS = 32
"""Number of calls that a log keeps."""

PAYLOAD_FACTORS = {"all_reduce": 2, "recv": 0}
"""Payload of an operation divided by its `bytes`; 1 for all others. Messages count at the sender."""


@dataclass(slots=True, eq=False)
class Call:
    """One operation of a group on this rank, with the name and the arguments of the Group's method.

    Attributes:
        operation: Name of the method, such as "all_reduce".
        tensor: Contiguous input tensor of this rank, or None. Dropped when the operation is complete.
        output: Contiguous tensor that it receives into, or None; the same as `tensor` for in-place
            operations.
        blocking: True if the transport must complete the operation before `Transport.run` returns.
        reduction: How numbers are reduced; None if the operation does not reduce.
        start: Time when the call began, in seconds of `perf_counter`.
        bytes: Size in bytes of the tensor that holds the data of all ranks, such as the output of an
            all-gather; by default the size of this rank's tensor.
        root: Rank of the group that is the root, or -1.
        peer: Rank of the group that a message goes to or comes from, or -1.
        tag: Tag of the message, which is the same on the sender and the receiver.
        counts: Number of elements of each rank's piece; None if all pieces have the same size.
        receive_counts: In an all-to-all of uneven pieces, the number of elements from each rank; otherwise
            None.
        file: Path of the file that all ranks open or close in this call, or "".
        error: Reason why that failed on this rank, or "".
        dtype: Type of the tensor; None if there is none.
        payload: Bytes that the ledger counts; without this rank's own piece in an all-to-all of uneven
            pieces.
        on_host: True if the tensor is in CPU memory, or if there is none.
        group: Log of the group; set by `GroupCalls.enter`.
        number: Number of the call among the collective calls of the group, or among the messages to or from
            the peer, from 1.
    """

    operation: str
    tensor: Tensor | None = None
    output: Tensor | None = None
    blocking: bool = True
    reduction: Reduction | None = None
    _: KW_ONLY
    start: float = field(default_factory=perf_counter)
    bytes: int = -1
    root: int = -1
    peer: int = -1
    tag: int = 0
    counts: Sequence[int] | None = None
    receive_counts: Sequence[int] | None = None
    file: str = ""
    error: str = ""
    dtype: torch.dtype | None = field(init=False)
    payload: int = field(init=False)
    on_host: bool = field(init=False)
    group: GroupCalls = field(init=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        memory = self.output if self.tensor is None else self.tensor
        if memory is None:
            self.dtype, self.on_host, size = None, True, 0
        else:
            self.dtype, self.on_host, size = memory.dtype, memory.is_cpu, memory.nbytes
        if self.bytes < 0:
            self.bytes = size
        self.payload = PAYLOAD_FACTORS.get(self.operation, 1) * self.bytes

    @property
    def memory(self) -> Tensor | None:
        """Input `tensor` of this rank; if it has none, its `output`; None if it has neither."""
        return self.output if self.tensor is None else self.tensor

    def with_memory(self, tensor: Tensor | None, output: Tensor | None) -> Call:
        """Return a copy of this call whose `tensor` and `output` are others; sizes, dtype and number stay."""
        other = copy(self)
        other.tensor, other.output = tensor, output
        return other

    def release(self) -> None:
        """Drop the references to the tensors, since the operation is complete."""
        self.tensor = self.output = None


class CallHistory:
    """Calls of this rank in all groups: the last ones, and the one that it is in now.

    Attributes:
        current: Call that the rank starts or waits for now; None while it computes.
        waiting_since: Time since when it waits for a call that it started earlier, in seconds of
            `perf_counter`.
        signs_of_life: Counter of signs of life other than calls, such as a new phase; the watchdog reads it.
        recent: Last calls, oldest first.
        groups: Logs of all groups.
    """

    def __init__(self) -> None:
        self.current: Call | None = None
        self.waiting_since = 0.0
        self.signs_of_life = 0
        self.recent: deque[Call] = deque(maxlen=RECENT_CALLS)
        self.groups: list[GroupCalls] = []
        self._indices: defaultdict[tuple[str, tuple[int, ...]], Iterator[int]] = defaultdict(count)

    def add_group(self, name: str, ranks: tuple[int, ...]) -> GroupCalls:
        """Make the log of a new group, and return it. Local.

        Groups with the same name and ranks get the numbers 0, 1, ... in the order in which they are made,
        which must be the same on all ranks.

        Args:
            name: Name of the group's axes.
            ranks: Ranks of the world that it consists of.
        """
        group = GroupCalls(self, name, ranks, next(self._indices[name, ranks]))
        self.groups.append(group)
        return group


class GroupCalls:
    """Calls of one group on this rank.

    Attributes:
        calls: Log of all groups of this rank.
        name: Name of the group's axes.
        ranks: Ranks of the world that it consists of.
        copy: Number of this group among those with the same name and ranks, from 0.
        communicator: Name of the group whose communicators it uses: its own, unless they are shared.
        entered: Number of collective calls of the group that this rank has begun.
        sent: Number of messages to each rank of the group.
        received: Number of messages from each rank of the group that this rank has begun to receive.
    """

    def __init__(self, calls: CallHistory, name: str, ranks: tuple[int, ...], copy: int) -> None:
        self.calls, self.name, self.ranks, self.copy = calls, name, ranks, copy
        self.communicator = name
        self.entered = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def enter(self, call: Call) -> None:
        """Record that this rank begins a call: set its number and its group, and make it the current call.

        Local. It changes the attributes `group` and `number` of the call. Collective calls of the group are
        counted together, messages for each peer and direction. The call replaces a current call of any group.
        `leave` ends it.
        """
        call.group = self
        peer = call.peer
        if peer < 0:
            self.entered = call.number = self.entered + 1
        else:
            numbers = self.sent if call.operation == "send" else self.received
            numbers[peer] = call.number = numbers.get(peer, 0) + 1
        calls = self.calls
        calls.current = call
        calls.recent.append(call)

    def leave(self) -> None:
        """Record that this rank is no longer inside any call: the CallHistory's `current` becomes None.

        Local.
        """
        self.calls.current = None

    @contextmanager
    def record(self, call: Call) -> Iterator[None]:
        """Return a context manager that enters a call at the start of its block and leaves it at the end.

        Local. It is for blocks that call MPI directly and so may wait for other ranks. MPI uses the processor
        while it waits. Outside of recorded calls, the watchdog takes that for work of this rank and reports
        no hang. The end of a call inside the block ends the record of the block, too: see `leave`.

        Args:
            call: Call whose operation is the name of the block in hang reports, such as "subworld".
        """
        self.enter(call)
        try:
            yield
        finally:
            self.leave()
