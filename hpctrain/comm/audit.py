"""Whether what is sent arrives, and sums are right: what each call left to be compared, and where it
differed.

Calls leave records of what this rank gave and got. The ranks of a group tell each other theirs only when they
settle, once a step, in one exchange per group: call by call nothing is sent for it but for messages between
two ranks, which are followed by their fingerprints. "cheap" looks at sums over ranks alone (`sum_check.py`),
"full" at every tensor that moves (`audited.py`). What ranks tell each other here is sent three times, so that
a bit that changes on its way is no fault of what is checked. Small Python values (`all_gather_object`,
agreements) are not looked at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from hpctrain.comm.calls import Call
from hpctrain.comm.faults import Fault, Faults
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.transports.mpi import MpiRequests, split_buffer
from hpctrain.host.mpi_library import MPI
from hpctrain.units import format_bytes

Depth = Literal["cheap", "full"]

UNSETTLED = 4096
"""Calls of a group after which its ranks tell each other what they have so far, if nobody settles."""

COPIES = 3


class Record:
    """What one call left: who called, and `complete` once it is all there."""

    __slots__ = ("bytes", "complete", "dtype", "group", "number", "operation", "phase")

    def __init__(self, call: Call, phase: str) -> None:
        self.operation, self.number, self.group = call.operation, call.number, call.group.name
        self.bytes, self.dtype = call.bytes, call.dtype
        self.phase, self.complete = phase, False

    def fault(self, ranks: Sequence[int], detail: str) -> Fault:
        """Something wrong with the call at these ranks of the world."""
        kind = str(self.dtype).removeprefix("torch.")
        what = f"call {self.number}, {format_bytes(self.bytes)} of {kind}: {detail}"
        return Fault("message", f"{self.operation} of {self.group}", self.phase, tuple(sorted(ranks)), what)


def voted(copies: Tensor) -> Tensor:
    """Of three copies side by side in dim 1, the bits that two of them have."""
    one, two, three = copies.unbind(1)
    return (one & two) | (one & three) | (two & three)


AnyRecord = TypeVar("AnyRecord", bound=Record)


class Log(ABC, Generic[AnyRecord]):
    """The records of one group's calls on this rank, in the order in which all its ranks start these.

    `ranks` are those of the world. What it finds goes to `found`.
    """

    def __init__(self, communicator: MPI.Intracomm, ranks: Sequence[int], found: Faults) -> None:
        self.communicator, self.ranks, self.found = communicator, tuple(ranks), found
        self.rank, self.size = communicator.rank, communicator.size
        self._records: list[AnyRecord] = []
        self._since = 0
        self._told: tuple[MpiRequests, Tensor, list[AnyRecord]] | None = None

    @abstractmethod
    def rows(self, records: Sequence[AnyRecord]) -> list[Tensor]:
        """Of each record what this rank tells each rank: int64, a row for each; as wide on all ranks."""

    @abstractmethod
    def judge(self, records: Sequence[AnyRecord], theirs: Sequence[Tensor]) -> None:
        """Find what is wrong, from the rows that each rank had for this one. Collective."""

    @abstractmethod
    def width(self, record: AnyRecord) -> int:
        """Numbers of a row."""

    def open(self, record: AnyRecord) -> None:
        """A call is started."""
        self._since += 1
        if self._since > UNSETTLED:
            self.tell()
        self._records.append(record)

    def tell(self) -> None:
        """Start to tell the other ranks what is there, once what was told before is judged. Collective."""
        self.conclude()
        self._since, records = 0, self._records
        if not records:
            return
        complete = 0
        while complete < len(records) and records[complete].complete:
            complete += 1
        rows = [torch.full((self.size, 1), complete), *self.rows(records[:complete])]
        rows += [rows[0].new_zeros(self.size, self.width(record)) for record in records[complete:]]
        mine = torch.cat(rows, 1).repeat(1, COPIES)
        theirs = torch.empty_like(mine)
        request = self.communicator.Ialltoall(
            split_buffer(mine, None, self.size), split_buffer(theirs, None, self.size)
        )
        self._told = MpiRequests([request], mine), theirs, list(records)

    def conclude(self) -> None:
        """Judge what was told: of the first records all that are complete everywhere. The others stay."""
        if self._told is None:
            return
        request, theirs, records = self._told
        self._told = None
        request.wait()
        theirs = voted(theirs.view(self.size, COPIES, -1))
        complete = int(theirs[:, 0].min())
        del self._records[:complete]
        widths = [1, *(self.width(record) for record in records)]
        if complete:
            self.judge(records[:complete], theirs.split(widths, 1)[1 : complete + 1])


class Audit:
    """Of one rank, for all its groups: `depth`, and what was found in calls of the `ledger`'s phases."""

    def __init__(self, depth: Depth, ledger: Ledger) -> None:
        self.depth, self.ledger, self.found = depth, ledger, Faults()
        self.logs: list[Log[Any]] = []

    def settle(self) -> list[Fault]:
        """What was wrong with calls since the last time, as this rank has found it; the others find the rest.

        Collective over all ranks, at any point of the program that they share. Waits for no call: those that
        are not complete on all ranks of their group are looked at the next time.
        """
        for log in self.logs:
            log.tell()
        for log in self.logs:
            log.conclude()
        return self.found.take()
