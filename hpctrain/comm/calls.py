"""Call: one described communication; and what this rank called, in each of its groups, and waits for now.

The record costs less than a microsecond a call. It is written by the thread that communicates and read by
another one, while the first may hang: what is read may be a call behind, and is never waited for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

Operation = Literal["sum", "max", "min"]

RECENT = 32  # calls that are remembered

PAYLOAD = {"all_reduce": 2, "recv": 0}
"""How often the closed forms count a tensor, where not once: a message is counted where it is sent."""


@dataclass(slots=True, eq=False)
class Call:
    """What a rank does in one operation of a group, named like the Group's methods.

    `tensor` is what it gives and `output` where it receives, both contiguous, or None; one tensor where the
    operation is in place. Neither is held longer than the operation lasts. `reduced` says how numbers are
    reduced; `root` and `peer` are ranks of the group, -1 where there is none. `counts` are elements for each
    rank, `received` those from each rank in an exchange of uneven pieces; None: equal on all ranks, as the
    tensor's own size says. `blocking` is whether the result is to be there when the call returns.

    For those who watch: `bytes` and `dtype` are the whole tensor's (this rank's, if not given), `payload`
    are the bytes that the ledger counts, of an exchange of uneven pieces without this rank's own; `on_host`
    says whether they are in host memory. `began` is in seconds of `perf_counter`. `number` counts the
    collective calls of the `group` on this rank from 1, or the messages to or from one peer. `file` is the
    path of a file that all ranks open or close in the call, and `error` the reason why that failed here; both
    are "" in other calls.
    """

    operation: str
    tensor: Tensor | None = None
    output: Tensor | None = None
    blocking: bool = True
    reduced: Operation | None = None
    _: KW_ONLY
    began: float = field(default_factory=perf_counter)
    bytes: int = -1
    root: int = -1
    peer: int = -1
    tag: int = 0
    counts: Sequence[int] | None = None
    received: Sequence[int] | None = None
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
        self.payload = PAYLOAD.get(self.operation, 1) * self.bytes

    @property
    def memory(self) -> Tensor | None:
        """What this rank gives, or, where it only receives, where it does."""
        return self.output if self.tensor is None else self.tensor

    def over(self, tensor: Tensor | None, output: Tensor | None) -> Call:
        """The same operation on other memory."""
        other = copy(self)
        other.tensor, other.output = tensor, output
        return other

    def release(self) -> None:
        """Hold the memory no longer: the operation is complete."""
        self.tensor = self.output = None


class Calls:
    """The calls of one rank in all groups: the newest ones, and the one that it is in.

    `current` is what the rank starts or waits for now, None while it computes. If it started that earlier,
    `waits` tells since when it waits for it. `beats` grows with all other signs of life.
    """

    def __init__(self) -> None:
        self.current: Call | None = None
        self.waits = 0.0
        self.beats = 0
        self.recent: deque[Call] = deque(maxlen=RECENT)
        self.groups: list[GroupCalls] = []
        self._copies: defaultdict[tuple[str, tuple[int, ...]], Iterator[int]] = defaultdict(count)

    def group(self, name: str, ranks: tuple[int, ...]) -> GroupCalls:
        """The record of a new group of these ranks of the world.

        Of groups with one name and the same ranks, the first made is the first on all of these.
        """
        made = GroupCalls(self, name, ranks, next(self._copies[name, ranks]))
        self.groups.append(made)
        return made


class GroupCalls:
    """The calls of one group on this rank: collectives `entered`, and messages to and from each peer."""

    def __init__(self, calls: Calls, name: str, ranks: tuple[int, ...], copy: int) -> None:
        self.calls, self.name, self.ranks, self.copy = calls, name, ranks, copy
        self.entered = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def enter(self, call: Call) -> None:
        """This rank comes to an operation."""
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
        """This rank has started an operation, or completed it."""
        self.calls.current = None
