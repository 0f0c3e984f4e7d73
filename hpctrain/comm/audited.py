"""A transport around another one, which checks what that moves and adds. No result changes by a bit.

"cheap" lets the other one do everything, and looks at sums before and after (`sum_check.py`). "full" takes
fingerprints of all that is given, for each receiver, and of all that comes (`moved.py`). In place of the
other's sums it moves what is to be added, so that the addends are seen as they come, and adds in rank order,
twice (`audited_sum.py`); sums that have another order, as NCCL's of more than two ranks, are checked as in
"cheap". A message from one rank to another is followed by its fingerprint, for which its ranks wait for a
GPU.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.audit import COPIES, Audit, Record, voted
from hpctrain.comm.audited_sum import AuditedSum, scratch_bytes
from hpctrain.comm.calls import Call
from hpctrain.comm.moved import MovedLog, MovedRecord, moved, not_as_given
from hpctrain.comm.sum_check import SumLog, SumRecord, summed
from hpctrain.comm.sums import fingerprint
from hpctrain.comm.transports.mpi import MpiRequests, flat_view
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.transport import SteppedWork, Steps, Transport, TransportWork, run_steps
from hpctrain.comm.turns import Turn, Turns
from hpctrain.host.mpi_library import MPI


class Channel:
    """What the transports of a group have for its audit: a communicator, logs, and turns. Collective."""

    def __init__(self, audit: Audit, communicator: MPI.Intracomm, ranks: Sequence[int]) -> None:
        self.audit, self.communicator, self.ranks = audit, communicator, ranks
        self.sums = SumLog(communicator, ranks, audit.found)
        self.moves = MovedLog(communicator, ranks, audit.found)
        audit.logs += [self.sums, self.moves]
        self.turns = Turns()
        self.announced: list[tuple[MPI.Request, array[int]]] = []


class AuditedTransport(Transport):
    """The calls of `inner`, checked; what sums receive lies in `scratch`."""

    def __init__(self, inner: Transport, channel: Channel, scratch: ReductionScratch) -> None:
        self.inner, self.channel, self.scratch = inner, channel, scratch
        self.rank, self.size, self.sharers = inner.rank, inner.size, inner.sharers
        self.in_rank_order = inner.in_rank_order
        self.full = channel.audit.depth == "full"

    @override
    def run(self, call: Call) -> TransportWork | None:
        phase = self.channel.audit.ledger.phase
        if call.operation in {"send", "recv"} and self.full:
            return self._message(call, phase)
        if call.reduced is not None and not (self.full and self.in_rank_order):
            return self._summed(call, phase)
        if not self.full:
            return self.inner.run(call)
        if call.operation == "barrier":
            return self._in_turn(lambda turn: _one_step(self._run(call), None, turn), call)
        record = MovedRecord(call, phase, self.size)
        self.channel.moves.open(record)
        return self._in_turn(lambda turn: self._moved(call, record, turn), call)

    def _in_turn(self, steps: Callable[[Turn], Steps], call: Call) -> TransportWork | None:
        return self.channel.turns.start(steps, call.blocking)

    def _summed(self, call: Call, phase: str) -> TransportWork | None:
        record = SumRecord(call, phase, self.size, self.inner)
        self.channel.sums.open(record)
        checked = summed(call, self.inner, record)
        if not self.full:
            return run_steps(_completing(checked, record), call.blocking)
        return self._in_turn(lambda turn: _one_step(checked, record, turn), call)

    def _run(self, call: Call) -> Steps:
        yield self.inner.run(call)

    def _moved(self, call: Call, record: MovedRecord, turn: Turn) -> Steps:
        if call.reduced is None:
            return _one_step(moved(call, self.inner, record), record, turn)
        return _completing(AuditedSum(call, self.inner, self.scratch, record, turn).steps(), record)

    def _message(self, call: Call, phase: str) -> TransportWork | None:
        """One from rank to rank, and its fingerprint, in its order."""
        if call.operation == "recv":
            return run_steps(self._hear(call, Record(call, phase)), call.blocking)
        assert call.tensor is not None
        channel = self.channel
        channel.announced = [each for each in channel.announced if not each[0].Test()]
        told = array("i", [int(fingerprint(flat_view(call.tensor)))] * COPIES)
        request = channel.communicator.Isend([told, MPI.INT], call.peer, call.tag)
        channel.announced.append((request, told))
        return self.inner.run(call)

    def _hear(self, call: Call, record: Record) -> Steps:
        channel, output, peer = self.channel, call.output, call.peer
        assert output is not None
        told = array("i", [0] * COPIES)
        telling = MpiRequests([channel.communicator.Irecv([told, MPI.INT], peer, call.tag)])
        yield self.inner.run(call)
        yield telling
        if int(voted(torch.tensor([told]))) != int(fingerprint(flat_view(output))):
            channel.audit.found.add([not_as_given(record, channel.ranks, self.rank, [peer])])

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.empty(shape, dtype, device)

    @override
    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return self.inner.common_zeros(length, dtype, device)

    @override
    def crosses_once(self, call: Call) -> bool:
        return self.inner.crosses_once(call) and not (self.full and call.reduced is not None)

    @override
    def adds_once(self, call: Call) -> bool:
        return self.inner.adds_once(call)

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        if self.full and self.in_rank_order:
            return scratch_bytes(elements, itemsize, self.size, scattered)
        return self.inner.scratch_bytes(elements, itemsize, scattered)


def _completing(steps: Steps, record: Record) -> Steps:
    yield from steps
    record.complete = True


def _one_step(steps: Steps, record: Record | None, turn: Turn) -> Steps:
    """What starts one operation, and needs no turn any more once that is started."""
    pending = SteppedWork(steps)
    turn.started = True
    yield pending
    if record is not None:
        record.complete = True


def around(
    pair: tuple[Transport, Transport],
    audit: Audit,
    communicator: MPI.Intracomm,
    ranks: Sequence[int],
    scratch: ReductionScratch,
) -> tuple[Transport, Transport]:
    """Those of a group of these ranks of the world, checked. Collective over a communicator of its own."""
    channel = Channel(audit, communicator, ranks)
    host, accelerator = (AuditedTransport(inner, channel, scratch) for inner in pair)
    return host, accelerator
