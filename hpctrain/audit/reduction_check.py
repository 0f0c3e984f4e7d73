"""Check of sums over ranks by their block sums, and of copies of results by their checksums.

Each rank adds up the blocks of its input before the call and of its result after it (`block_sums.py`). For
each rank's span of the tensor, the next rank compares: the block sums of all inputs must make the block sum
of the result, within the bound of the rounding error, and exactly for integers. So each change above the
rounding error of a block sum is found. All copies of the result of an all-reduce must have the same checksum.
Blocks with infinite values or NaN in an input are not checked, nor are copies with NaN.

A fault names the ranks with wrong results. If all ranks have the same wrong sum, it names the rank that adds
for all, if the transport works like that, else all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.audit.bits import word_sum
from hpctrain.audit.block_sums import (
    absolute_sum,
    block_elements,
    block_sums,
    can_compare_sums,
    exact_sum,
    rounding_bounds,
)
from hpctrain.audit.call_log import AuditLog, CallRecord
from hpctrain.comm.calls import Call
from hpctrain.comm.transports.reduction import equal_counts
from hpctrain.comm.transports.transport import ElementRange, Steps, Transport, flat_view, ranges_of_ranks

# A record of several blocks has _HEAD values, and _EACH values per block; a record of one block has _SMALL.
_HEAD = 2  # checksum of the result, and 1 if the result has NaN
_EACH = 3  # sum of the input, bound of its absolute sum, and sum of the result
_SMALL = 4  # checksum of the result, and the three values of the block
_DIFFER = "the copies of the result differ"


class ReductionRecord(CallRecord):
    """Block sums of one reduction.

    Small tensors, and reductions that are no sums, are one block, whose values are in `numbers`. Others have
    blocks within the span of each rank, whose values are in `values`, fp64 `[ranks, blocks, 3]`.

    Attributes:
        has_checked_sum: True if the call is a sum whose block sums can be checked.
        adds_at_owner: True if each element is added by one rank, its owner, for all ranks.
        spans: First element and number of elements of each rank; empty if the tensor is one block.
        bits: Checksum of the result.
    """

    __slots__ = (
        "adds_at_owner",
        "bits",
        "block",
        "count",
        "has_checked_sum",
        "length",
        "numbers",
        "root",
        "size",
        "spans",
        "values",
    )

    def __init__(self, call: Call, phase: str, size: int, inner: Transport) -> None:
        super().__init__(call, phase)
        tensor = call.tensor
        assert tensor is not None
        self.length, self.root, self.size = tensor.numel(), call.root, size
        self.has_checked_sum = call.reduction == "sum" and can_compare_sums(tensor.dtype) and self.length > 0
        self.block, self.count, self.adds_at_owner = block_elements(self.length, tensor.dtype), 0, False
        self.spans: Sequence[ElementRange] = ()
        self.numbers: list[Tensor] = []
        if not self.has_checked_sum or (call.operation != "reduce_scatter" and self.length < self.block):
            return
        self.adds_at_owner = call.operation == "all_reduce" and inner.adds_at_owner(call)
        counts = call.counts if call.operation == "reduce_scatter" else equal_counts(self.length, size)
        self.spans = ranges_of_ranks(counts, tensor, size)
        longest = max(count for _, count in self.spans)
        self.block = block_elements(longest, tensor.dtype)
        self.count = -(-longest // self.block)
        self.values = torch.zeros((size, self.count, _EACH), dtype=torch.float64, device=tensor.device)
        self.bits = torch.zeros((), dtype=torch.int32, device=tensor.device)

    @property
    def is_one_block(self) -> bool:
        """True if the whole tensor is one block, False if each rank's span has blocks of its own."""
        return not self.spans

    @property
    def result_ranks(self) -> Sequence[int] | None:
        """Ranks of the group with the whole result (all, or the root); None for a reduce_scatter."""
        if self.operation == "reduce_scatter":
            return None
        return [self.root] if self.operation == "reduce" else range(self.size)

    def record_input(self, tensor: Tensor) -> None:
        """Add up the blocks of the input of this rank, and keep the sums in place of earlier ones. Local.

        Call this before the reduction, which may overwrite its input.

        Args:
            tensor: Flat input of this rank.
        """
        if self.is_one_block:
            zero = torch.zeros((), dtype=torch.float64, device=tensor.device)
            self.numbers = [exact_sum(tensor), absolute_sum(tensor)] if self.has_checked_sum else [zero, zero]
            return
        for values, (begin, count) in zip(self.values, self.spans, strict=True):
            if count:
                sums, _ = block_sums(tensor[begin : begin + count], self.block, is_input=True)
                values[: len(sums), :2] = sums

    def record_result(self, tensor: Tensor | None, rank: int) -> None:
        """Add up the blocks of this rank's result, and keep the sums in the record. Local.

        Every rank calls it once, after `record_input` and when the reduction is complete. It does not mark
        the record as complete.

        Args:
            tensor: Flat result of this rank: the whole one, or its own elements of a reduce_scatter; None if
                it has none, as on ranks other than the root of a reduce.
            rank: This rank in the group.
        """
        if self.is_one_block:
            whole = self.operation == "all_reduce" and tensor is not None
            bits = word_sum(tensor) if whole and tensor is not None else self.numbers[0].new_zeros(())
            total = self.numbers[0] if tensor is None else exact_sum(tensor)
            self.numbers = [bits.long().view(torch.float64), *self.numbers, total]
            return
        for peer, (begin, count) in enumerate(self.spans):
            if count and tensor is not None and (peer == rank or self.operation != "reduce_scatter"):
                part = tensor if self.operation == "reduce_scatter" else tensor[begin : begin + count]
                sums, bits = block_sums(part, self.block, is_input=False)
                self.values[peer, : len(sums), 2] = sums[:, 0]
                self.bits = self.bits + bits


class ReductionLog(AuditLog[ReductionRecord]):
    """Records of the reductions of one group."""

    @override
    def width(self, record: ReductionRecord) -> int:
        return _SMALL if record.is_one_block else _HEAD + _EACH * record.count

    @override
    def rows(self, records: Sequence[ReductionRecord]) -> list[Tensor]:
        small = [number for record in records if record.is_one_block for number in record.numbers]
        packed: Iterator[Tensor] = iter(())
        if small:
            values = torch.stack(small).cpu().view(torch.int64).view(-1, _SMALL)
            packed = iter(values.unsqueeze(1).expand(-1, self.size, -1).unbind())
        return [next(packed) if record.is_one_block else self._blocks(record) for record in records]

    def _blocks(self, record: ReductionRecord) -> Tensor:
        """Return the values of a record for each rank: rank r gets and compares the blocks of rank r - 1."""
        row = torch.zeros((self.size, self.width(record)), dtype=torch.int64)
        row[:, 0] = record.bits
        if _floats(record):
            row[:, 1] = record.values[..., 2].isnan().any()
        values = record.values.roll(1, 0).cpu().view(torch.int64)
        row[:, _HEAD:] = values.reshape(self.size, -1)
        return row

    @override
    def compare(self, records: Sequence[ReductionRecord], rows_by_rank: Sequence[Tensor]) -> None:
        """Compare the block sums of inputs and results, and the checksums of copies, and collect the faults.

        Collective. The next rank compares the blocks of a rank's span, and ranks take turns in comparing
        records of one block. So each difference is collected on one rank. The ranks exchange more only if
        copies of a result differ.
        """
        self._compare_small(
            [each for each in zip(records, rows_by_rank, strict=True) if each[0].is_one_block]
        )
        wrong: list[tuple[ReductionRecord, Sequence[int], str]] = []
        differing: dict[int, list[int]] = {}
        for index, (record, rows) in enumerate(zip(records, rows_by_rank, strict=True)):
            if record.is_one_block:
                continue
            wrong += ((record, blamed, phrase) for blamed, phrase in self._wrong_blocks(record, rows))
            bits = rows[:, 0].tolist()
            if record.operation == "all_reduce" and len(set(bits)) > 1 and not rows[:, 1].any():
                differing[index] = bits
        if differing:  # ranks with wrong sums are blamed first, so they must be known
            local_blame = [[each[1] for each in wrong if each[0] is records[index]] for index in differing]
            all_blame = self.communicator.allgather(local_blame)
            for place, (index, bits) in enumerate(differing.items()):
                wrong = [each for each in wrong if each[0] is not records[index]]
                if self.rank == 0:
                    blamed = {rank for by_record in all_blame for ranks in by_record[place] for rank in ranks}
                    wrong.append((records[index], _wrong_copies(bits, blamed), _DIFFER))
        for record, ranks, phrase in wrong:
            self._add(record, ranks, phrase)

    def _compare_small(self, pairs: Sequence[tuple[ReductionRecord, Tensor]]) -> None:
        if not pairs:
            return
        records = [record for record, _ in pairs]
        numbers = torch.stack([rows for _, rows in pairs], 1)
        bits, floats = numbers[..., 0], torch.tensor([_floats(record) for record in records])
        sums = torch.tensor([record.has_checked_sum for record in records])
        allowed = torch.tensor([self._allowed(record, record.length) for record in records]).double()
        bad = _is_wrong_sum(numbers[..., 1:], records, allowed) & sums
        for place in range(self.size):
            bad[place] &= torch.tensor([place in (record.result_ranks or ()) for record in records])
        nan = numbers[..., 3].view(torch.float64).isnan().any(0) & floats
        differ = (bits != bits[0]).any(0) & ~nan
        for index in (bad.any(0) | differ).nonzero().flatten().tolist():
            record, blamed = records[index], set(bad[:, index].nonzero().flatten().tolist())
            if record.number % self.size != self.rank:
                continue
            if differ[index]:
                self._add(record, _wrong_copies(bits[:, index].tolist(), blamed), _DIFFER)
            else:
                partly = record.operation == "all_reduce" and len(blamed) < self.size
                self._add(record, sorted(blamed) if partly else range(self.size), "the sum is wrong")

    def _add(self, record: ReductionRecord, places: Sequence[int], detail: str) -> None:
        self.faults.add([record.fault([self.ranks[place] for place in places], detail)])

    def _wrong_blocks(self, record: ReductionRecord, rows: Tensor) -> Iterator[tuple[list[int], str]]:
        """Yield the ranks with wrong sums of the blocks that this rank compares, and a phrase about them."""
        owner = (self.rank - 1) % self.size
        begin, length = record.spans[owner]
        lengths = [max(0, min(record.block, length - index * record.block)) for index in range(record.count)]
        allowed = torch.tensor([self._allowed(record, each) for each in lengths]).double()
        numbers = rows[:, _HEAD:].reshape(self.size, record.count, _EACH)
        holders = record.result_ranks or [owner]
        bad = _is_wrong_sum(numbers, [record] * record.count, allowed)[list(holders)]
        wrong: dict[tuple[int, ...], list[int]] = {}
        for index in bad.any(0).nonzero().flatten().tolist():
            places = [place for place, each in zip(holders, bad[:, index].tolist(), strict=True) if each]
            wrong.setdefault(tuple(places), []).append(index)
        for at, blocks in wrong.items():
            first = begin + blocks[0] * record.block
            words = f"the sum of elements {first} to {first + lengths[blocks[0]] - 1} is wrong"
            more = f", and of {len(blocks) - 1} more blocks" if len(blocks) > 1 else ""
            if record.operation == "all_reduce" and len(at) == self.size:
                yield ([owner] if record.adds_at_owner else list(at)), f"{words} on all ranks{more}"
            else:
                yield (list(range(self.size)) if record.operation == "reduce" else list(at)), words + more

    def _allowed(self, record: ReductionRecord, length: int) -> tuple[float, float]:
        assert record.dtype is not None
        if not _floats(record):
            return 0.0, 0.0
        return rounding_bounds(self.size, length, record.block, record.dtype)


def _is_wrong_sum(numbers: Tensor, records: Sequence[ReductionRecord], allowed: Tensor) -> Tensor:
    """Return True for each block sum of a result that differs from that of the inputs beyond rounding errors.

    Args:
        numbers: Values of blocks, int64 `[ranks, blocks, 3]`.
        records: Record of each block.
        allowed: Bounds of each block, `[blocks, 2]`, as `rounding_bounds` returns them; ignored for integers.

    Returns:
        A bool tensor `[ranks, blocks]`.
    """
    values = numbers.view(torch.float64)
    inputs, absolute, result = values[..., 0].sum(0), values[..., 1].sum(0), values[..., 2]
    absolute = absolute * (1 + 2.0**-20)
    largest = torch.tensor([_largest_number(record) for record in records], dtype=torch.float64)
    wrongly_infinite = ~result.isfinite() & (absolute < largest)  # the sum of these inputs cannot overflow
    bad = ((result - inputs).abs() > allowed[:, 0] * absolute + allowed[:, 1]) | wrongly_infinite
    differences = numbers[..., 0].sum(0) - numbers[..., 2]
    for index, record in enumerate(records):
        if not _floats(record):
            assert record.dtype is not None
            bits = 8 * record.dtype.itemsize
            difference = differences[:, index]
            bad[:, index] = (difference % 2**bits if bits < 64 else difference) != 0  # sums of integers wrap
    return bad


def _largest_number(record: ReductionRecord) -> float:
    assert record.dtype is not None
    return float(torch.finfo(record.dtype).max) if _floats(record) else 0.0


def _floats(record: ReductionRecord) -> bool:
    return record.dtype is not None and record.dtype.is_floating_point


def _wrong_copies(bits: Sequence[int], blamed: Collection[int]) -> Sequence[int]:
    """Return the ranks whose copies are wrong.

    These are the ranks with wrong sums, else those in the minority, else all ranks.
    """
    if 0 < len(blamed) < len(bits):
        return sorted(blamed)
    (most, times), *_ = Counter(bits).most_common()
    if 2 * times > len(bits):
        return [place for place, each in enumerate(bits) if each != most]
    return range(len(bits))


def run_reduction(call: Call, inner: Transport, record: ReductionRecord) -> Steps:
    """Return the steps that record this rank's input, run a reduction, and record its result.

    Collective, as the call. Nothing runs before the first step is taken; `run_steps` takes them. Nothing is
    compared, and the caller sets `record.complete` after the last step.

    Args:
        call: An all_reduce, reduce or reduce_scatter, blocking or not.
        inner: Transport that runs it.
        record: Record of this call, into which the block sums go.
    """
    tensor, output = call.tensor, call.output
    assert tensor is not None
    record.record_input(flat_view(tensor))
    yield inner.run(call)
    record.record_result(None if output is None else flat_view(output), inner.rank)
