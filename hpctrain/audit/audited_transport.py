"""Transport that checks the calls of another transport. No result changes by a bit.

Without `full`, the inner transport runs all calls, and sums over ranks are checked (`reduction_check.py`).
With `full`, checksums of all data are compared (`transfer_check.py`). Sums are then not left to the inner
transport: it moves the inputs, so that they can be checked, and this rank adds them in rank order twice
(`audited_reduction.py`). Sums of transports with another order, such as NCCL with more than two ranks, are
checked as without `full`. A message between two ranks is followed by its checksum. For a tensor on a GPU,
sender and receiver each wait until the GPU has computed the checksum.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from hpctrain.audit.audited_reduction import AuditedReduction, audited_scratch_bytes
from hpctrain.audit.bits import COPIES, majority, word_sum
from hpctrain.audit.call_log import AuditLog, CallRecord
from hpctrain.audit.detected_fault import FaultCollector
from hpctrain.audit.reduction_check import ReductionLog, ReductionRecord, run_reduction
from hpctrain.audit.start_order import OrderedOperation, StartOrder
from hpctrain.audit.transfer_check import TransferLog, TransferRecord, changed_message_fault, run_transfer
from hpctrain.comm.calls import Call
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.transports.mpi import MpiRequests
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.transport import (
    SteppedWork,
    Steps,
    Transport,
    TransportWork,
    WrappedTransport,
    flat_view,
    run_steps,
)
from hpctrain.host.mpi_library import MPI


class AuditChannel:
    """State that both transports of a group, for CPU and for GPU memory, share for the audit.

    Args:
        communicator: Communicator of the ranks of the group, for nothing but the audit.
        ranks: Ranks of the group in the whole world.
        faults: Where faults are collected.
        ledger: Ledger of the world, whose phase each fault names.
        full: True if every tensor that moves is checked, False if only sums over ranks are.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        ranks: Sequence[int],
        faults: FaultCollector,
        ledger: Ledger,
        full: bool,
    ) -> None:
        self.communicator, self.ranks, self.faults = communicator, ranks, faults
        self.ledger, self.full = ledger, full
        self.reductions = ReductionLog(communicator, ranks, faults)
        self.transfers = TransferLog(communicator, ranks, faults)
        self.order = StartOrder()
        self.sent_checksums: list[tuple[MPI.Request, array[int]]] = []

    @property
    def logs(self) -> list[AuditLog[Any]]:
        """Logs of the group's calls: that of checked sums over ranks, and that of checked transfers."""
        return [self.reductions, self.transfers]


class AuditedTransport(WrappedTransport):
    """Transport that checks the calls of `inner`, whose sums use `scratch` for what they receive."""

    def __init__(self, inner: Transport, channel: AuditChannel, scratch: ReductionScratch) -> None:
        super().__init__(inner)
        self.channel, self.scratch = channel, scratch
        self.full = channel.full

    @override
    def run(self, call: Call) -> TransportWork | None:
        """Run or start a call of a Group, and record it for the next comparison. Collective, as the call.

        Faults of received messages are added to the collector at once, those of other calls when the logs are
        compared. No error is raised.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        phase = self.channel.ledger.phase
        if call.operation in {"send", "recv"} and self.full:
            return self._message(call, phase)
        if call.reduction is not None and not (self.full and self.sums_in_rank_order):
            return self._reduce(call, phase)
        if not self.full:
            return self.inner.run(call)
        if call.operation == "barrier":
            return self._in_order(lambda operation: _one_step(self._run(call), None, operation), call)
        record = TransferRecord(call, phase, self.size)
        self.channel.transfers.open(record)
        return self._in_order(lambda operation: self._transfer(call, record, operation), call)

    def _in_order(self, steps: Callable[[OrderedOperation], Steps], call: Call) -> TransportWork | None:
        return self.channel.order.start(steps, call.blocking)

    def _reduce(self, call: Call, phase: str) -> TransportWork | None:
        record = ReductionRecord(call, phase, self.size, self.inner)
        self.channel.reductions.open(record)
        checked = run_reduction(call, self.inner, record)
        if not self.full:
            return run_steps(_completing(checked, record), call.blocking)
        return self._in_order(lambda operation: _one_step(checked, record, operation), call)

    def _run(self, call: Call) -> Steps:
        yield self.inner.run(call)

    def _transfer(self, call: Call, record: TransferRecord, operation: OrderedOperation) -> Steps:
        if call.reduction is None:
            return _one_step(run_transfer(call, self.inner, record), record, operation)
        return _completing(
            AuditedReduction(call, self.inner, self.scratch, record, operation).steps(), record
        )

    def _message(self, call: Call, phase: str) -> TransportWork | None:
        """Send or receive a message and its checksum."""
        if call.operation == "recv":
            return run_steps(self._receive(call, CallRecord(call, phase)), call.blocking)
        assert call.tensor is not None
        channel = self.channel
        channel.sent_checksums = [each for each in channel.sent_checksums if not each[0].Test()]
        checksums = array("i", [int(word_sum(flat_view(call.tensor)))] * COPIES)
        request = channel.communicator.Isend([checksums, MPI.INT], call.peer, call.tag)
        channel.sent_checksums.append((request, checksums))
        return self.inner.run(call)

    def _receive(self, call: Call, record: CallRecord) -> Steps:
        channel, output, peer = self.channel, call.output, call.peer
        assert output is not None
        checksums = array("i", [0] * COPIES)
        receiving = MpiRequests([channel.communicator.Irecv([checksums, MPI.INT], peer, call.tag)])
        yield self.inner.run(call)
        yield receiving
        if int(majority(torch.tensor([checksums]))) != int(word_sum(flat_view(output))):
            channel.faults.add([changed_message_fault(record, channel.ranks, self.rank, [peer])])

    @override
    def crosses_links_once(self, call: Call) -> bool:
        return self.inner.crosses_links_once(call) and not (self.full and call.reduction is not None)

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        if self.full and self.sums_in_rank_order:
            return audited_scratch_bytes(elements, itemsize, self.size, scattered)
        return self.inner.scratch_bytes(elements, itemsize, scattered)


def _completing(steps: Steps, record: CallRecord) -> Steps:
    yield from steps
    record.complete = True


def _one_step(steps: Steps, record: CallRecord | None, operation: OrderedOperation) -> Steps:
    """Return the steps of an operation that starts nothing more after its first call."""
    pending = SteppedWork(steps)
    operation.started = True
    yield pending
    if record is not None:
        record.complete = True
