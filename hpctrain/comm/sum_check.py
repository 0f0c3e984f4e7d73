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
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.comm.audit import Log, Record
from hpctrain.comm.calls import Call
from hpctrain.comm.mpi import flat
from hpctrain.comm.reduction import split
from hpctrain.comm.sums import block_elements, block_sums, fingerprint, is_linear, rounding
from hpctrain.comm.transport import Span, Steps, Transport, spans_of

_HEAD = 2  # fingerprint, and whether there is NaN
_EACH = 3  # sum and bound of what is given, sum of what came out


class SumRecord(Record):
    """Of one reduction, with the sums of each rank's span of its tensor."""

    __slots__ = ("adder", "blocks", "elements", "of_bits", "of_nan", "root", "spans", "values")

    def __init__(self, call: Call, phase: str, size: int, adder: bool) -> None:
        super().__init__(call, phase)
        tensor = call.tensor
        assert tensor is not None
        elements, self.root, self.adder = tensor.numel(), call.root, False
        self.spans: Sequence[Span] = ()
        if call.reduced == "sum" and is_linear(tensor.dtype):
            if call.operation == "reduce_scatter":
                self.spans = spans_of(call.counts, tensor, size)
            elif elements <= block_elements(elements, tensor.dtype):
                self.spans = [(0, elements), *[(elements, 0)] * (size - 1)]
            else:
                self.spans, self.adder = spans_of(split(elements, size), tensor, size), adder
        longest = max((count for _, count in self.spans), default=0)
        self.elements = block_elements(longest, tensor.dtype)
        self.blocks = -(-longest // self.elements)
        self.values = torch.zeros((size, self.blocks, _EACH), dtype=torch.float64, device=tensor.device)
        self.of_bits = self.of_nan = torch.zeros((), dtype=torch.int32, device=tensor.device)

    def note_given(self, tensor: Tensor) -> None:
        """Sum up what this rank gives."""
        for values, (begin, count) in zip(self.values, self.spans, strict=False):
            if count:
                sums = block_sums(tensor[begin : begin + count], self.elements)
                values[: len(sums), :2] = sums

    def note_taken(self, tensor: Tensor, rank: int) -> None:
        """Sum up what this rank has got."""
        whole = self.operation != "reduce_scatter"
        for peer, (begin, count) in enumerate(self.spans):
            if count and (whole or peer == rank):
                part = tensor[begin : begin + count] if whole else tensor
                sums = block_sums(part, self.elements)[:, 0]
                self.values[peer, : len(sums), 2] = sums
        if self.operation == "all_reduce":
            self.of_bits = fingerprint(tensor)
            if tensor.is_floating_point():
                sums = self.values[..., 2] if self.blocks else tensor.float()
                self.of_nan = sums.sum().isnan()


class SumLog(Log[SumRecord]):
    """Those of one group."""

    def width(self, record: SumRecord) -> int:
        """See Log."""
        return _HEAD + _EACH * record.blocks

    def rows(self, records: Sequence[SumRecord]) -> list[Tensor]:
        """See Log."""
        rows = []
        for record in records:
            row = torch.empty((self.size, self.width(record)), dtype=torch.int64)
            row[:, 0], row[:, 1] = record.of_bits, record.of_nan
            judged = record.values.roll(1, 0).view(torch.int64)  # a rank's blocks by the next one
            row[:, _HEAD:] = judged.reshape(self.size, _EACH * record.blocks)
            rows.append(row)
        return rows

    def judge(self, records: Sequence[SumRecord], theirs: Sequence[Tensor]) -> None:
        """See Log. Where bits differ, ranks tell each other whose sums were wrong before one is blamed."""
        wrong = {
            index: list(self._wrong(*each)) for index, each in enumerate(zip(records, theirs, strict=True))
        }
        differing = [
            index
            for index, (record, rows) in enumerate(zip(records, theirs, strict=True))
            if record.operation == "all_reduce" and not rows[:, 1].any() and len(set(rows[:, 0].tolist())) > 1
        ]
        if differing:
            of_all = self.communicator.allgather([[bad for bad, _ in wrong[index]] for index in differing])
            for place, index in enumerate(differing):
                blamed = sorted({rank for told in of_all for bad in told[place] for rank in bad})
                if self.rank == 0:
                    self._add(records[index], *_odd(theirs[index][:, 0].tolist(), blamed))
                wrong[index] = []
        for index, found in wrong.items():
            for bad, detail in found:
                self._add(records[index], bad, detail)

    def _add(self, record: SumRecord, places: Sequence[int], detail: str) -> None:
        self.found.add([record.fault([self.ranks[place] for place in places], detail)])

    def _wrong(self, record: SumRecord, rows: Tensor) -> Iterator[tuple[list[int], str]]:
        """The blocks that this rank judges whose sums are wrong: where, in the group, and in words."""
        owner = (self.rank - 1) % self.size
        begin, count = record.spans[owner] if record.spans else (0, 0)
        if not count:
            return
        numbers = rows[:, _HEAD:].reshape(self.size, record.blocks, _EACH)
        bad = _exactly(numbers, record) if not _floats(record) else self._beyond(numbers, record, count)
        holders = {"all_reduce": range(self.size), "reduce": [record.root]}.get(record.operation, [owner])
        for block in bad[list(holders)].any(0).nonzero().flatten().tolist():
            places = [place for place in holders if bad[place, block]]
            first = block * record.elements
            last = min(first + record.elements, count)
            words = f"the sum of elements {begin + first} to {begin + last - 1} is wrong"
            if len(places) == self.size:
                yield ([owner] if record.adder else places), f"{words} on all ranks"
            elif record.operation == "reduce" and not record.adder:
                yield list(range(self.size)), words
            else:
                yield sorted({*places, *([owner] if record.operation == "reduce" else [])}), words

    def _beyond(self, numbers: Tensor, record: SumRecord, count: int) -> Tensor:
        """Which results of whom are farther from what was given than rounding explains."""
        assert record.dtype is not None
        values = numbers.view(torch.float64)
        given, bounds, taken = values[..., 0].sum(0), values[..., 1].sum(0), values[..., 2]
        bounds = bounds * (1 + 2.0**-20)
        allowed = torch.zeros_like(bounds)
        for block in range(record.blocks):
            length = max(0, min(record.elements, count - block * record.elements))
            times, more = rounding(self.size, length, record.elements, record.dtype)
            allowed[block] = times * bounds[block] + more
        lost = ~taken.isfinite() & (bounds < torch.finfo(record.dtype).max)  # no sum could overflow
        return ((taken - given).abs() > allowed) | lost


def _exactly(numbers: Tensor, record: SumRecord) -> Tensor:
    assert record.dtype is not None
    off = numbers[..., 0].sum(0) - numbers[..., 2]
    bits = 8 * record.dtype.itemsize
    return (off % 2**bits if bits < 64 else off) != 0  # as sums that overflow


def _floats(record: SumRecord) -> bool:
    return record.dtype is not None and record.dtype.is_floating_point


def _odd(bits: Sequence[int], blamed: Sequence[int]) -> tuple[Sequence[int], str]:
    """Whose copies are wrong: those of wrong sums, else those that are not as most are, else any."""
    words = "the copies of the result differ"
    if 0 < len(blamed) < len(bits):
        return blamed, words
    (most, times), *_ = Counter(bits).most_common()
    if 2 * times > len(bits):
        return [place for place, each in enumerate(bits) if each != most], words
    return range(len(bits)), words


def summed(call: Call, inner: Transport, record: SumRecord) -> Steps:
    """Run a reduction, and note what it is of."""
    tensor, output = call.tensor, call.output
    assert tensor is not None
    record.note_given(flat(tensor))
    yield inner.run(call)
    if output is not None:
        record.note_taken(flat(output), inner.rank)
