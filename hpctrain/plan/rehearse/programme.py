"""Programmes of the ranks in a step, which are lists of calls, and the groups that the calls use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

SEND, RECEIVE, WAIT = "send", "recv", "wait"
"""Operations that one rank calls alone: messages, and the wait for a started call."""

NEW_GROUP = "new_group"
"""Operation by which the ranks of a group create communicators together."""

AUDIT = "audit of "
"""Prefix of the name of the communicator that checks the calls of another one for silent faults."""


@dataclass(frozen=True, slots=True)
class RehearsedCall:
    """One event in the programme of a rank: a message, a collective call or a wait.

    Attributes:
        operation: Name of the operation.
        group: Name of the group.
        bytes: Payload of this rank.
        offset: Distance in the group, modulo its size, from this rank to the peer of a message.
        tag: Tag of a message.
        what: Content of a message; for a collective, what all members must agree on besides bytes and format.
        format: dtype of the elements.
        blocking: True if the rank waits for the call at once.
        action: Action of the schedule to which the event belongs.
        call_index: For a wait, the index in the programme of the call that it waits for.
        sent: Elements sent to each rank of the group, if the pieces of an exchange may differ; `bytes` of
            ranks may then differ, too.
        received: Elements received from each rank of the group, as `sent`.
    """

    operation: str
    group: str = ""
    bytes: int = 0
    offset: int = 0
    tag: int = 0
    what: str = ""
    format: str = ""
    blocking: bool = True
    action: str = ""
    call_index: int = -1
    sent: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None

    @property
    def is_message(self) -> bool:
        """True if one other rank takes part, instead of the whole group."""
        return self.operation in {SEND, RECEIVE}

    @property
    def is_collective(self) -> bool:
        """True if all ranks of the group take part."""
        return not self.is_message and self.operation != WAIT

    @property
    def content(self) -> tuple[object, ...]:
        """Everything that must be equal in matching calls, except the size."""
        if self.is_message:
            return self.what, self.format
        return self.operation, self.what, self.format, self.action, self.sent is None

    def __str__(self) -> str:
        name = self.what if self.is_message else f"{self.operation} {self.what}".rstrip()
        size = "" if self.sent is not None or self.operation == NEW_GROUP else f" of {self.bytes} bytes"
        where = f" in {self.action}" if self.action and self.action != self.what else ""
        return f"{name or self.operation}{size}{where}"


Programme = tuple[RehearsedCall, ...]


class Membership:
    """Members of the groups of one name, such as all tensor groups.

    Args:
        rows: Ranks of each group in their order, [groups, size].
        ranks: Number of ranks of the job.

    Attributes:
        row_of: Number of the group of each rank; -1 if it is in none, [ranks].
        place_of: Place of each rank in its group; -1 if it is in none, [ranks].
    """

    def __init__(self, rows: Numbers, ranks: int) -> None:
        self.rows = rows
        self.row_of = np.full(ranks, -1, dtype=np.int64)
        self.place_of = np.full(ranks, -1, dtype=np.int64)
        numbers, places = np.indices(rows.shape)
        self.row_of[rows], self.place_of[rows] = numbers, places

    @property
    def size(self) -> int:
        """Number of ranks of each group."""
        return int(self.rows.shape[1])

    def group_of(self, rank: int) -> Numbers:
        """Return the ranks of the group of a rank."""
        row: Numbers = self.rows[self.row_of[rank]]
        return row

    def peers(self, ranks: Numbers, offset: int) -> Numbers:
        """Return, for each of these ranks, the rank `offset` places further in its group, [ranks]."""
        peers: Numbers = self.rows[self.row_of[ranks], (self.place_of[ranks] + offset) % self.size]
        return peers


@dataclass(frozen=True)
class StepProgrammes:
    """Programmes of all ranks in a step.

    Attributes:
        programmes: Different programmes.
        programme_of: Index of the programme of each rank, [ranks].
        groups: Members of the groups by name.
        place: Function that describes a rank with its coordinates.
    """

    programmes: Sequence[Programme]
    programme_of: Numbers
    groups: Mapping[str, Membership]
    place: Callable[[int], str] = field(default=lambda rank: f"rank {rank}")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.programme_of)

    @cached_property
    def used_groups(self) -> list[set[tuple[str, int]]]:
        """Groups that each programme uses, with the offset of each peer, which is 0 for collectives."""
        return [{(e.group, e.offset) for e in events if e.operation != WAIT} for events in self.programmes]
