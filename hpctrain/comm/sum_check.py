"""Sums over ranks, checked by sums that are carried along, and copies of results by their bits.

What each rank gives is summed up before, what comes out after the call, block by block (`sums.py`). Of the
blocks of one rank's piece its neighbour is told, and judges: the sums of what all have given make that of
what came out, within the bound on rounding, of integers exactly. So every change above the rounding of a
block's sum is found. All copies of an all_reduce have the same bits, whatever it reduces. Nothing is said of
blocks to which a rank gives infinite values or none (NaN), and of copies with NaN.

It lies at the ranks whose results are wrong. Where all have the same wrong sum it lies at the one that adds,
if the transport has one add for all, else at any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.audit import Log, Record
from hpctrain.comm.calls import Call
from hpctrain.comm.sums import (
    absolute_sum,
    block_elements,
    block_sums,
    exact_sum,
    fingerprint,
    is_linear,
    rounding,
)
from hpctrain.comm.transports.mpi import flat_view
from hpctrain.comm.transports.reduction import equal_counts
from hpctrain.comm.transports.transport import ElementRange, Steps, Transport, ranges_of_ranks

_HEAD = 2  # of a record in blocks: the fingerprint of what came out, and whether there is NaN
_EACH = 3  # of a block: sum and bound of what is given, sum of what came out
_DIFFER = "the copies of the result differ"
_SMALL = 4  # of a record of one block: the fingerprint, and a block's


class SumRecord(Record):
    """Of one reduction: of a small one, which is one block, `numbers` alone; of others `values` of the blocks
    of each rank's span. What is no sum that can be checked is small.
    """

    __slots__ = (
        "adder",
        "bits",
        "block",
        "count",
        "length",
        "numbers",
        "root",
        "size",
        "spans",
        "sums",
        "values",
    )

    def __init__(self, call: Call, phase: str, size: int, inner: Transport) -> None:
        super().__init__(call, phase)
        tensor = call.tensor
        assert tensor is not None
        self.length, self.root, self.size = tensor.numel(), call.root, size
        self.sums = call.reduced == "sum" and is_linear(tensor.dtype) and self.length > 0
        self.block, self.count, self.adder = block_elements(self.length, tensor.dtype), 0, False
        self.spans: Sequence[ElementRange] = ()
        self.numbers: list[Tensor] = []
        if not self.sums or (call.operation != "reduce_scatter" and self.length < self.block):
            return
        self.adder = call.operation == "all_reduce" and inner.adds_once(call)
        counts = call.counts if call.operation == "reduce_scatter" else equal_counts(self.length, size)
        self.spans = ranges_of_ranks(counts, tensor, size)
        longest = max(count for _, count in self.spans)
        self.block = block_elements(longest, tensor.dtype)
        self.count = -(-longest // self.block)
        self.values = torch.zeros((size, self.count, _EACH), dtype=torch.float64, device=tensor.device)
        self.bits = torch.zeros((), dtype=torch.int32, device=tensor.device)

    @property
    def small(self) -> bool:
        """Whether it is one block."""
        return not self.spans

    @property
    def holders(self) -> Sequence[int] | None:
        """Who has got the sums; None: each rank those of its span."""
        if self.operation == "reduce_scatter":
            return None
        return [self.root] if self.operation == "reduce" else range(self.size)

    def note_given(self, tensor: Tensor) -> None:
        """Sum up what this rank gives."""
        if self.small:
            zero = torch.zeros((), dtype=torch.float64, device=tensor.device)
            self.numbers = [exact_sum(tensor), absolute_sum(tensor)] if self.sums else [zero, zero]
            return
        for values, (begin, count) in zip(self.values, self.spans, strict=True):
            if count:
                sums, _ = block_sums(tensor[begin : begin + count], self.block, given=True)
                values[: len(sums), :2] = sums

    def note_taken(self, tensor: Tensor | None, rank: int) -> None:
        """Sum up what this rank has got, if anything."""
        if self.small:
            whole = self.operation == "all_reduce" and tensor is not None
            bits = fingerprint(tensor) if whole and tensor is not None else self.numbers[0].new_zeros(())
            total = self.numbers[0] if tensor is None else exact_sum(tensor)
            self.numbers = [bits.long().view(torch.float64), *self.numbers, total]
            return
        for peer, (begin, count) in enumerate(self.spans):
            if count and tensor is not None and (peer == rank or self.operation != "reduce_scatter"):
                part = tensor if self.operation == "reduce_scatter" else tensor[begin : begin + count]
                sums, bits = block_sums(part, self.block, given=False)
                self.values[peer, : len(sums), 2] = sums[:, 0]
                self.bits = self.bits + bits


class SumLog(Log[SumRecord]):
    """Those of one group."""

    @override
    def width(self, record: SumRecord) -> int:
        return _SMALL if record.small else _HEAD + _EACH * record.count

    @override
    def rows(self, records: Sequence[SumRecord]) -> list[Tensor]:
        small = [number for record in records if record.small for number in record.numbers]
        packed: Iterator[Tensor] = iter(())
        if small:
            told = torch.stack(small).cpu().view(torch.int64).view(-1, _SMALL)
            packed = iter(told.unsqueeze(1).expand(-1, self.size, -1).unbind())
        return [next(packed) if record.small else self._blocks(record) for record in records]

    def _blocks(self, record: SumRecord) -> Tensor:
        """A rank's blocks for the next one to judge."""
        row = torch.zeros((self.size, self.width(record)), dtype=torch.int64)
        row[:, 0] = record.bits
        if _floats(record):
            row[:, 1] = record.values[..., 2].isnan().any()
        judged = record.values.roll(1, 0).cpu().view(torch.int64)
        row[:, _HEAD:] = judged.reshape(self.size, -1)
        return row

    def judge(self, records: Sequence[SumRecord], theirs: Sequence[Tensor]) -> None:
        """See Log. Of blocks of a rank's piece the next one judges, of small ones all ranks in turn."""
        self._judge_small([each for each in zip(records, theirs, strict=True) if each[0].small])
        wrong: list[tuple[SumRecord, Sequence[int], str]] = []
        differing: dict[int, list[int]] = {}
        for index, (record, rows) in enumerate(zip(records, theirs, strict=True)):
            if record.small:
                continue
            wrong += ((record, bad, words) for bad, words in self._wrong(record, rows))
            bits = rows[:, 0].tolist()
            if record.operation == "all_reduce" and len(set(bits)) > 1 and not rows[:, 1].any():
                differing[index] = bits
        if differing:  # whose sums are wrong is to be known before one is blamed
            mine = [[bad for each, bad, _ in wrong if each is records[index]] for index in differing]
            of_all = self.communicator.allgather(mine)
            for place, (index, bits) in enumerate(differing.items()):
                wrong = [each for each in wrong if each[0] is not records[index]]
                if self.rank == 0:
                    blamed = {rank for told in of_all for bad in told[place] for rank in bad}
                    wrong.append((records[index], _odd(bits, blamed), _DIFFER))
        for record, bad, words in wrong:
            self._add(record, bad, words)

    def _judge_small(self, told: Sequence[tuple[SumRecord, Tensor]]) -> None:
        if not told:
            return
        records = [record for record, _ in told]
        numbers = torch.stack([rows for _, rows in told], 1)
        bits, floats = numbers[..., 0], torch.tensor([_floats(record) for record in records])
        sums = torch.tensor([record.sums for record in records])
        allowed = torch.tensor([self._allowed(record, record.length) for record in records]).double()
        bad = _beyond(numbers[..., 1:], records, allowed) & sums
        for place in range(self.size):
            bad[place] &= torch.tensor([place in (record.holders or ()) for record in records])
        nan = numbers[..., 3].view(torch.float64).isnan().any(0) & floats
        differ = (bits != bits[0]).any(0) & ~nan
        for index in (bad.any(0) | differ).nonzero().flatten().tolist():
            record, blamed = records[index], set(bad[:, index].nonzero().flatten().tolist())
            if record.number % self.size != self.rank:
                continue
            if differ[index]:
                self._add(record, _odd(bits[:, index].tolist(), blamed), _DIFFER)
            else:
                partly = record.operation == "all_reduce" and len(blamed) < self.size
                self._add(record, sorted(blamed) if partly else range(self.size), "the sum is wrong")

    def _add(self, record: SumRecord, places: Sequence[int], detail: str) -> None:
        self.found.add([record.fault([self.ranks[place] for place in places], detail)])

    def _wrong(self, record: SumRecord, rows: Tensor) -> Iterator[tuple[list[int], str]]:
        """Of the blocks that this rank judges those whose sums are wrong: where, and in words."""
        owner = (self.rank - 1) % self.size
        begin, length = record.spans[owner]
        lengths = [max(0, min(record.block, length - index * record.block)) for index in range(record.count)]
        allowed = torch.tensor([self._allowed(record, each) for each in lengths]).double()
        numbers = rows[:, _HEAD:].reshape(self.size, record.count, _EACH)
        holders = record.holders or [owner]
        bad = _beyond(numbers, [record] * record.count, allowed)[list(holders)]
        wrong: dict[tuple[int, ...], list[int]] = {}
        for index in bad.any(0).nonzero().flatten().tolist():
            places = [place for place, each in zip(holders, bad[:, index].tolist(), strict=True) if each]
            wrong.setdefault(tuple(places), []).append(index)
        for at, blocks in wrong.items():
            first = begin + blocks[0] * record.block
            words = f"the sum of elements {first} to {first + lengths[blocks[0]] - 1} is wrong"
            more = f", and of {len(blocks) - 1} more blocks" if len(blocks) > 1 else ""
            if record.operation == "all_reduce" and len(at) == self.size:
                yield ([owner] if record.adder else list(at)), f"{words} on all ranks{more}"
            else:
                yield (list(range(self.size)) if record.operation == "reduce" else list(at)), words + more

    def _allowed(self, record: SumRecord, length: int) -> tuple[float, float]:
        assert record.dtype is not None
        if not _floats(record):
            return 0.0, 0.0
        return rounding(self.size, length, record.block, record.dtype)


def _beyond(numbers: Tensor, records: Sequence[SumRecord], allowed: Tensor) -> Tensor:
    """Which sums of what came out, by ranks and blocks, are farther from those of what ranks gave than
    rounding explains: of floats by `allowed` times their bound, and more; of integers at all.
    """
    values = numbers.view(torch.float64)
    given, bounds, taken = values[..., 0].sum(0), values[..., 1].sum(0), values[..., 2]
    bounds = bounds * (1 + 2.0**-20)
    most = torch.tensor([_most(record) for record in records], dtype=torch.float64)
    lost = ~taken.isfinite() & (bounds < most)  # where no sum could overflow
    bad = ((taken - given).abs() > allowed[:, 0] * bounds + allowed[:, 1]) | lost
    off = numbers[..., 0].sum(0) - numbers[..., 2]
    for index, record in enumerate(records):
        if not _floats(record):
            assert record.dtype is not None
            bits = 8 * record.dtype.itemsize
            bad[:, index] = (off[:, index] % 2**bits if bits < 64 else off[:, index]) != 0  # sums overflow
    return bad


def _most(record: SumRecord) -> float:
    assert record.dtype is not None
    return float(torch.finfo(record.dtype).max) if _floats(record) else 0.0


def _floats(record: SumRecord) -> bool:
    return record.dtype is not None and record.dtype.is_floating_point


def _odd(bits: Sequence[int], blamed: Collection[int]) -> Sequence[int]:
    """Whose copies are wrong: those of wrong sums, else those that are not as most are, else any."""
    if 0 < len(blamed) < len(bits):
        return sorted(blamed)
    (most, times), *_ = Counter(bits).most_common()
    if 2 * times > len(bits):
        return [place for place, each in enumerate(bits) if each != most]
    return range(len(bits))


def summed(call: Call, inner: Transport, record: SumRecord) -> Steps:
    """Run a reduction, and note what it is of."""
    tensor, output = call.tensor, call.output
    assert tensor is not None
    record.note_given(flat_view(tensor))
    yield inner.run(call)
    record.note_taken(None if output is None else flat_view(output), inner.rank)
