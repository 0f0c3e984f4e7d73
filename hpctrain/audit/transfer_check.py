"""Check of moved tensors: checksums of what each rank sends to each peer, and of what it receives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.audit.block_sums import word_sums_by_rank
from hpctrain.audit.call_log import AuditLog, CallRecord
from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.comm.calls import Call
from hpctrain.comm.error_messages import name_ranks
from hpctrain.comm.transports.transport import Steps, Transport, flat_view, pairwise_ranges


class TransferRecord(CallRecord):
    """Checksums of one call.

    Attributes:
        sent: Checksum of all data that was sent to each rank, int32 `[ranks]`.
        received: Checksum of all data that came from each rank, int32 `[ranks]`.
        recomputed: Difference between the checksums of the sums that this rank computed and of the same sums
            computed again; 0 if they are equal.
    """

    __slots__ = ("received", "recomputed", "sent")

    def __init__(self, call: Call, phase: str, size: int) -> None:
        super().__init__(call, phase)
        device = None if call.memory is None else call.memory.device
        self.sent = self.received = torch.zeros(size, dtype=torch.int32, device=device)
        self.recomputed = torch.zeros((), dtype=torch.int32, device=device)


class TransferLog(AuditLog[TransferRecord]):
    """Records of the calls of one group that move tensors."""

    @override
    def width(self, record: TransferRecord) -> int:
        return 1

    @override
    def rows(self, records: Sequence[TransferRecord]) -> list[Tensor]:
        return [torch.stack([record.sent.cpu() for record in records], 1).long()] if records else []

    @override
    def compare(self, records: Sequence[TransferRecord], rows_by_rank: Sequence[Tensor]) -> None:
        """Compare what other ranks sent with what this rank received, and its sums with those computed again.

        Local. Differences are collected as faults on this rank, the receiver.
        """
        here = self.ranks[self.rank]
        received = torch.stack([record.received.cpu() for record in records], 1)
        differs = torch.cat(tuple(rows_by_rank), 1) != received
        for index in differs.any(0).nonzero().flatten().tolist():
            peers = differs[:, index].nonzero().flatten().tolist()
            self.faults.add([changed_message_fault(records[index], self.ranks, self.rank, peers)])
        recomputed = torch.stack([record.recomputed.cpu() for record in records])
        for index in recomputed.nonzero().flatten().tolist():
            detail = f"two computations of the same sum on rank {here} differ"
            self.faults.add([records[index].fault([here], detail)])


def changed_message_fault(
    record: CallRecord, ranks: Sequence[int], rank: int, peers: Sequence[int]
) -> DetectedFault:
    """Return the fault of a rank that received something else than its peers sent.

    Nothing is collected or raised.

    Args:
        record: Record of the call.
        ranks: Ranks of the group in the whole world.
        rank: Receiver, as a rank of the group; the fault names it alone as perhaps faulty.
        peers: Senders, as ranks of the group, for the text.
    """
    senders = name_ranks([ranks[peer] for peer in peers])
    return record.fault(
        [ranks[rank]], f"data that rank {ranks[rank]} received differ from what {senders} sent"
    )


def run_transfer(call: Call, inner: Transport, record: TransferRecord, sent: Tensor | None = None) -> Steps:
    """Return the steps that run a call that moves tensors, and then add its checksums to the record.

    Collective, as the call. Nothing runs before the first step is taken. The caller sets `record.complete`,
    since a record may have several such calls.

    Args:
        call: A broadcast, all_gather, gather, scatter or all_to_all.
        inner: Transport that runs it.
        record: Record to which the checksums are added.
        sent: Checksum of the data that this rank sends to each rank, int32 `[ranks]`, with 0 for itself and
            for ranks to which it sends nothing; None to compute it.
    """
    source, sends, target, receives = pairwise_ranges(call, inner.size)
    if sent is None:
        sent = word_sums_by_rank(flat_view(source), sends, inner.rank)
    record.sent = record.sent + sent
    yield inner.run(call)
    record.received = record.received + word_sums_by_rank(flat_view(target), receives, inner.rank)
