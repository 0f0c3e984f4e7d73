"""What this rank called, in each of its groups, and what it waits for now.

The record costs less than a microsecond a call. It is written by the thread that communicates and read by
another one, while the first may hang: what is read may be a call behind, and is never waited for.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

RECENT = 32
"""Calls that are remembered."""


class Call(NamedTuple):
    """One call of a group.

    `number` counts the group's collective calls on this rank from 1, or the messages to or from one
    `peer` (its rank in the group; -1 for collectives). `bytes` is the tensor's, `began` in seconds of
    `perf_counter`.
    """

    group: GroupCalls
    operation: str
    number: int
    bytes: int
    dtype: torch.dtype | None
    peer: int
    began: float


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

    def group(self, name: str, ranks: tuple[int, ...]) -> GroupCalls:
        """The record of a new group of these ranks of the world.

        Of groups with one name and the same ranks, the first made is the first on all of these.
        """
        copy = sum(other.name == name and other.ranks == ranks for other in self.groups)
        made = GroupCalls(self, name, ranks, copy)
        self.groups.append(made)
        return made


class GroupCalls:
    """The calls of one group on this rank: collectives `entered`, and messages to and from each peer."""

    def __init__(self, calls: Calls, name: str, ranks: tuple[int, ...], copy: int) -> None:
        self.calls, self.name, self.ranks, self.copy = calls, name, ranks, copy
        self.entered = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def enter(self, operation: str, bytes: int, dtype: torch.dtype | None, began: float) -> Call:  # noqa: A002
        """This rank comes to a collective operation."""
        self.entered = number = self.entered + 1
        calls = self.calls
        calls.current = call = Call(self, operation, number, bytes, dtype, -1, began)
        calls.recent.append(call)
        return call

    def enter_pair(self, operation: str, tensor: torch.Tensor, peer: int, began: float) -> Call:
        """This rank comes to a send or a receive."""
        numbers = self.sent if operation == "send" else self.received
        numbers[peer] = number = numbers.get(peer, 0) + 1
        calls = self.calls
        calls.current = call = Call(self, operation, number, tensor.nbytes, tensor.dtype, peer, began)
        calls.recent.append(call)
        return call

    def leave(self) -> None:
        """This rank has started an operation, or completed it."""
        self.calls.current = None
