"""Logs of the calls of a group, whose records the ranks of the group exchange and compare.

Each call leaves a record of what this rank sent and received. The ranks of a group exchange their records
once per step, in one message per group. Each value is sent three times, and the bitwise majority counts, so
that a bit that changes during the exchange is not reported as a fault of the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hpctrain.audit.bits import COPIES, majority
from hpctrain.audit.detected_fault import DetectedFault, FaultCollector
from hpctrain.comm.calls import Call
from hpctrain.comm.transports.mpi import MpiRequests, split_buffer
from hpctrain.host.mpi_library import MPI
from hpctrain.units import format_bytes

CALLS_PER_EXCHANGE = 4096
"""Number of calls after which ranks exchange their records even without a call of `collect_faults`."""


class CallRecord:
    """Record of one call, which is compared with those of the other ranks.

    The transport that runs the call sets `complete` after the last step. A record that never becomes
    complete, such as after an error, and all later records of its group are never compared.

    Attributes:
        phase: Phase of the ledger in which the call was made.
        complete: True once the call is complete on this rank and the record is final.
    """

    __slots__ = ("bytes", "complete", "dtype", "group", "number", "operation", "phase")

    def __init__(self, call: Call, phase: str) -> None:
        self.operation, self.number, self.group = call.operation, call.number, call.group.name
        self.bytes, self.dtype = call.bytes, call.dtype
        self.phase, self.complete = phase, False

    def fault(self, ranks: Sequence[int], detail: str) -> DetectedFault:
        """Return a new fault of this call. Nothing is collected.

        Args:
            ranks: Ranks of the world of which at least one is faulty.
            detail: What was found, in words.
        """
        kind = str(self.dtype).removeprefix("torch.")
        what = f"call {self.number}, {format_bytes(self.bytes)} of {kind}: {detail}"
        return DetectedFault(
            "message", f"{self.operation} of {self.group}", self.phase, tuple(sorted(ranks)), what
        )


AnyRecord = TypeVar("AnyRecord", bound=CallRecord)


class AuditLog(ABC, Generic[AnyRecord]):
    """Records of the calls of one group on this rank, in the order in which all its ranks start these calls.

    Args:
        communicator: Communicator of the group for the exchange of records.
        ranks: Ranks of the group in the whole world.
        faults: Where faults are collected.
    """

    def __init__(self, communicator: MPI.Intracomm, ranks: Sequence[int], faults: FaultCollector) -> None:
        self.communicator, self.ranks, self.faults = communicator, tuple(ranks), faults
        self.rank, self.size = communicator.rank, communicator.size
        self._records: list[AnyRecord] = []
        self._since = 0
        self._exchange: tuple[MpiRequests, Tensor, list[AnyRecord]] | None = None

    @abstractmethod
    def rows(self, records: Sequence[AnyRecord]) -> list[Tensor]:
        """Return what this rank sends to each rank about each record; row r goes to rank r. Local.

        Returns:
            One int64 tensor `[ranks, width]` in CPU memory per record, in order, or tensors whose
            concatenation along dim 1 is that; [] without records.
        """

    @abstractmethod
    def compare(self, records: Sequence[AnyRecord], rows_by_rank: Sequence[Tensor]) -> None:
        """Compare the records with what the other ranks sent about them, and collect the faults.

        Collective.

        Args:
            records: Records that are complete on all ranks.
            rows_by_rank: For each record, the rows that each rank sent to this one, int64 `[ranks, width]`.
        """

    @abstractmethod
    def width(self, record: AnyRecord) -> int:
        """Return the number of int64 values that each rank sends to each other rank about a record.

        It is the same on all ranks, and known before the call is complete.
        """

    def open(self, record: AnyRecord) -> None:
        """Add the record of a call that starts now.

        All ranks of the group call this for the same calls in the same order, before the call is complete. It
        is local, except once in CALLS_PER_EXCHANGE calls since the last `start_exchange`: then it is
        collective and calls `start_exchange` for the earlier records. Differences do not raise an error: they
        are added to the FaultCollector `faults`.
        """
        self._since += 1
        if self._since > CALLS_PER_EXCHANGE:
            self.start_exchange()
        self._records.append(record)

    def start_exchange(self) -> None:
        """Start to exchange all records of this log with the other ranks of the group. Collective.

        If an earlier exchange is not finished, this first waits for it, and compares its records; otherwise
        it does not wait. Differences do not raise an error: they are collected in `faults`. Nothing is sent
        if there are no records, which is then so on all ranks. `finish_exchange` completes the exchange and
        may be called in any case. Until then all records stay.
        """
        self.finish_exchange()
        self._since, records = 0, self._records
        if not records:
            return
        complete = 0
        while complete < len(records) and records[complete].complete:
            complete += 1
        rows = [torch.full((self.size, 1), complete), *self.rows(records[:complete])]
        rows += [rows[0].new_zeros(self.size, self.width(record)) for record in records[complete:]]
        sent = torch.cat(rows, 1).repeat(1, COPIES)
        received = torch.empty_like(sent)
        request = self.communicator.Ialltoall(
            split_buffer(sent, None, self.size), split_buffer(received, None, self.size)
        )
        self._exchange = MpiRequests([request], sent), received, list(records)

    def finish_exchange(self) -> None:
        """Wait for the exchange that was started, compare its records, and collect the faults. Collective.

        The first records that are complete on all ranks are compared and dropped. The others stay for the
        next exchange. Nothing happens if no exchange was started.
        """
        if self._exchange is None:
            return
        request, received, records = self._exchange
        self._exchange = None
        request.wait()
        received = majority(received.view(self.size, COPIES, -1))
        complete = int(received[:, 0].min())
        del self._records[:complete]
        widths = [1, *(self.width(record) for record in records)]
        if complete:
            self.compare(records[:complete], received.split(widths, 1)[1 : complete + 1])
