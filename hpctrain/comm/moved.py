"""What moves from rank to rank, by fingerprints: what each gives to each, and what of it comes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.audit import Log, Record
from hpctrain.comm.calls import Call
from hpctrain.comm.faults import Fault
from hpctrain.comm.outcome import name_ranks
from hpctrain.comm.sums import fingerprints
from hpctrain.comm.transports.mpi import flat_view
from hpctrain.comm.transports.transport import ElementRange, Steps, Transport, pairwise_ranges


class MovedRecord(Record):
    """Of one call, fingerprints of all that was given to each rank, and got from each, added up; and how far
    those of sums that this rank has added are from those that came of adding again.
    """

    __slots__ = ("again", "given", "got")

    def __init__(self, call: Call, phase: str, size: int) -> None:
        super().__init__(call, phase)
        device = None if call.memory is None else call.memory.device
        self.given = self.got = torch.zeros(size, dtype=torch.int32, device=device)
        self.again = torch.zeros((), dtype=torch.int32, device=device)


class MovedLog(Log[MovedRecord]):
    """Those of one group."""

    @override
    def width(self, record: MovedRecord) -> int:
        return 1

    @override
    def rows(self, records: Sequence[MovedRecord]) -> list[Tensor]:
        return [torch.stack([record.given.cpu() for record in records], 1).long()] if records else []

    def judge(self, records: Sequence[MovedRecord], theirs: Sequence[Tensor]) -> None:
        """See Log. What differs lies where it came to."""
        here = self.ranks[self.rank]
        got = torch.stack([record.got.cpu() for record in records], 1)
        differs = torch.cat(tuple(theirs), 1) != got
        for index in differs.any(0).nonzero().flatten().tolist():
            peers = differs[:, index].nonzero().flatten().tolist()
            self.found.add([not_as_given(records[index], self.ranks, self.rank, peers)])
        again = torch.stack([record.again.cpu() for record in records])
        for index in again.nonzero().flatten().tolist():
            detail = f"rank {here} added, added again, and had another sum"
            self.found.add([records[index].fault([here], detail)])


def not_as_given(record: Record, ranks: Sequence[int], rank: int, peers: Sequence[int]) -> Fault:
    """Of the `ranks` of a group one got something else than peers gave: it lies where it came to."""
    gave = name_ranks([ranks[peer] for peer in peers])
    return record.fault([ranks[rank]], f"rank {ranks[rank]} has something else than {gave} gave")


def moved(call: Call, inner: Transport, record: MovedRecord, given: Tensor | None = None) -> Steps:
    """Run a call that moves pieces, and note what is given, if that is not known, and what comes."""
    source, sends, target, receives = _spans(call, inner.size)
    if given is None:
        given = fingerprints(flat_view(source), sends, inner.rank)
    record.given = record.given + given
    yield inner.run(call)
    record.got = record.got + fingerprints(flat_view(target), receives, inner.rank)


def _spans(call: Call, size: int) -> tuple[Tensor, list[ElementRange], Tensor, list[ElementRange]]:
    """As `pairwise_ranges`, and of a broadcast, too."""
    if call.operation != "broadcast":
        return pairwise_ranges(call, size)
    tensor, gives = call.memory, call.tensor is not None
    assert tensor is not None
    sends = [(0, tensor.numel() if gives else 0)] * size
    receives = [(0, 0 if gives or peer != call.root else tensor.numel()) for peer in range(size)]
    return tensor, sends, tensor, receives
