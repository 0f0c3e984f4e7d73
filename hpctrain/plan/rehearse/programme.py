"""What ranks do in a step: programmes of events, who follows which, and who is in which group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

SEND, RECEIVE, WAIT = "send", "recv", "wait"
"""Operations that are not called by all of a group: messages, and waiting for what was started."""

NEW_GROUP = "new_group"
"""Operation by which the ranks of a group create communicators together."""

AUDIT = "audit of "
"""Begin of the name of the communicator on which calls of another one are checked for silent faults."""


@dataclass(frozen=True, slots=True)
class RehearsedCall:
    """One operation of a rank in a `group` by its name.

    A message goes to, or comes from, the rank that is `step` places further in the group, round it; it has a
    `tag`. `what` says what a message carries, and of a collective in what all members must agree besides its
    `bytes` and `format`, the type of its elements. Of an exchange of uneven pieces `sent` and `received` are
    elements by rank of the group, and `bytes` may differ. A wait is for the event of the programme with the
    index `of`. `action` is where in the schedule it belongs.
    """

    operation: str
    group: str = ""
    bytes: int = 0
    step: int = 0
    tag: int = 0
    what: str = ""
    format: str = ""
    blocking: bool = True
    action: str = ""
    of: int = -1
    sent: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None

    @property
    def is_message(self) -> bool:
        """Whether one other rank takes part, and not a whole group."""
        return self.operation in {SEND, RECEIVE}

    @property
    def is_collective(self) -> bool:
        """Whether all of the group take part."""
        return not self.is_message and self.operation != WAIT

    @property
    def content(self) -> tuple[object, ...]:
        """What tells it from others of its group, but for its size."""
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
    """Which ranks are together in the groups of one name: rows of ranks, [groups, size], in their order."""

    def __init__(self, rows: Numbers, ranks: int) -> None:
        self.rows = rows
        self.row_of = np.full(ranks, -1, dtype=np.int64)
        self.place_of = np.full(ranks, -1, dtype=np.int64)
        numbers, places = np.indices(rows.shape)
        self.row_of[rows], self.place_of[rows] = numbers, places

    @property
    def size(self) -> int:
        """Ranks of each group."""
        return int(self.rows.shape[1])

    def of(self, rank: int) -> Numbers:
        """The ranks of one rank's group."""
        row: Numbers = self.rows[self.row_of[rank]]
        return row

    def peers(self, ranks: Numbers, step: int) -> Numbers:
        """Of each of some ranks the one `step` places further in its group."""
        found: Numbers = self.rows[self.row_of[ranks], (self.place_of[ranks] + step) % self.size]
        return found


@dataclass(frozen=True)
class StepProgrammes:
    """All ranks of a step: `programme_of` [ranks] are indices of their `programmes`; `groups` by name.

    `place` says in words which rank a number is.
    """

    programmes: Sequence[Programme]
    programme_of: Numbers
    groups: Mapping[str, Membership]
    place: Callable[[int], str] = field(default=lambda rank: f"rank {rank}")

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.programme_of)

    @cached_property
    def used(self) -> list[set[tuple[str, int]]]:
        """Of each programme the names of its groups, with the steps to peers there, 0 for collectives."""
        return [{(e.group, e.step) for e in events if e.operation != WAIT} for events in self.programmes]
