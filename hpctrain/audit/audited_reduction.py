"""Sums over ranks whose inputs are checked when they arrive, and which are computed twice.

Another transport moves the inputs. As in `transports/reduction.py`, each element has one owner that receives
it from all ranks and adds in rank order. An all-reduce then gathers the sums. If the tensor is small, every
rank receives everything. The results have the bits of the transports' own sums. All ranks start the calls of
the inner transport in the same order, and the rounds have bounded memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.audit.bits import word_sum
from hpctrain.audit.start_order import OrderedOperation
from hpctrain.audit.transfer_check import TransferRecord, run_transfer
from hpctrain.comm.calls import Call
from hpctrain.comm.transports.reduction import (
    HOST_ROUND_BYTES,
    REDUCTION_BLOCK,
    SIGNED,
    SMALL_BYTES,
    ReductionScratch,
    equal_counts,
    reduce_block,
)
from hpctrain.comm.transports.transport import (
    ElementRange,
    ParallelWork,
    SteppedWork,
    Steps,
    Transport,
    TransportWork,
    flat_view,
    ranges_of_ranks,
)


class AuditedReduction:
    """One reduction.

    Args:
        call: The call.
        inner: Transport that moves the inputs and the results.
        scratch: Memory for what this rank receives.
        record: Record of the call, to which checksums are added.
        operation: The same call in the StartOrder of its group.
    """

    def __init__(
        self,
        call: Call,
        inner: Transport,
        scratch: ReductionScratch,
        record: TransferRecord,
        operation: OrderedOperation,
    ) -> None:
        assert call.tensor is not None and call.reduction is not None
        self.call, self.inner, self.scratch, self.record = call, inner, scratch, record
        self.ordered = operation
        self.rank, self.size = inner.rank, inner.size
        self.tensor, self.reduction = flat_view(call.tensor), call.reduction
        self.output = None if call.output is None else flat_view(call.output)

    def steps(self) -> Steps:
        """Return the steps of the reduction, which all ranks of the group run.

        Nothing happens before the first one. After them, the results are in the tensors of the call, and the
        record has all checksums.
        """
        if self.tensor.nbytes * self.size <= SMALL_BYTES:
            yield from self._gather_and_reduce()
        elif self.call.operation == "reduce_scatter":
            yield from self._reduce_scatter()
        else:
            yield from self._reduce_and_send()

    def _gather_and_reduce(self) -> Steps:
        """Gather the whole inputs of all ranks on each rank, which adds the elements that it needs itself.

        This is for tensors of at most SMALL_BYTES over all ranks.
        """
        tensor = self.tensor
        parts = tensor.new_empty((self.size, tensor.numel()))
        call = Call("all_gather", tensor, parts.view(-1), self.call.blocking, bytes=parts.nbytes)
        pending = SteppedWork(run_transfer(call, self.inner, self.record))
        self.ordered.started = True
        yield pending
        if self.output is None:
            return
        begin, count = 0, tensor.numel()
        if self.call.operation == "reduce_scatter":
            begin, count = ranges_of_ranks(self.call.counts, tensor, self.size)[self.rank]
        self._add(parts[:, begin : begin + count].unbind(), self.output)

    def _reduce_and_send(self) -> Steps:
        """Run an all_reduce or a reduce: each rank adds its piece of every round, and sends the sums on.

        The sums go to all ranks, or to the root of a reduce.
        """
        root, size, rank = self.call.root, self.size, self.rank
        rounds = self.tensor.split(size * elements_per_round(self.tensor, size))
        longest = equal_counts(rounds[0].numel(), size)[0]
        memory = self._take(min(2, len(rounds)) * (size + (root >= 0)) * longest)
        halves = memory.view(-1, (size + (root >= 0)) * longest)

        def launch(index: int) -> SteppedWork:
            counts = equal_counts(rounds[index].numel(), size)
            received = [counts[rank]] * size
            into = halves[index % 2][: sum(received)]
            call = Call("all_to_all", rounds[index], into, False, counts=counts, receive_counts=received)
            return SteppedWork(run_transfer(call, self.inner, self.record))

        results: list[TransportWork] = []
        ahead: SteppedWork | None = launch(0)
        for index, block in enumerate(rounds):
            pending, ahead = ahead, launch(index + 1) if index + 1 < len(rounds) else None
            yield pending
            counts = equal_counts(block.numel(), size)
            begin, count = ranges_of_ranks(counts, block, size)[rank]
            sums = block[begin : begin + count]
            if root not in (-1, rank):
                sums = halves[index % 2][size * longest :][:count]
            checksum = self._add(halves[index % 2][: size * count].view(size, count).unbind(), sums)
            call = self._result(sums, block, counts, self.call.blocking and len(rounds) == 1)
            target = range(size) if root < 0 else [root]
            checksums = torch.zeros_like(self.record.sent)
            for peer in target:
                if peer != rank:
                    checksums[peer] = checksum
            results.append(SteppedWork(run_transfer(call, self.inner, self.record, checksums)))
            self.ordered.started = ahead is None
            if root >= 0:
                yield results.pop()
        yield ParallelWork(results)
        self._give(memory)

    def _result(self, sums: Tensor, block: Tensor, counts: Sequence[int], blocking: bool) -> Call:
        """Return the call that sends this rank's sums of a round to the ranks that need them."""
        root = self.call.root
        if root < 0:
            return Call("all_gather", sums, block, blocking, bytes=block.nbytes, counts=counts)
        output = block if self.rank == root else None
        return Call("gather", sums, output, blocking, bytes=block.nbytes, root=root, counts=counts)

    def _reduce_scatter(self) -> Steps:
        """Run a reduce_scatter: each rank receives its piece from all ranks, and adds it.

        If there are several rounds, the data that this rank sends in a round is first copied into contiguous
        memory.
        """
        size, rank, tensor = self.size, self.rank, self.tensor
        assert self.output is not None
        spans = ranges_of_ranks(self.call.counts, tensor, size)
        longest = max(count for _, count in spans)
        piece = min(longest, elements_per_round(tensor, size))
        count = -(-longest // piece)
        memory = self._take(min(2, count) * size * piece * (2 if count > 1 else 1))
        halves = memory.view(min(2, count), -1, size * piece)

        def launch(index: int) -> SteppedWork:
            now = [_cut(span, index, piece) for span in spans]
            counts = [length for _, length in now]
            source = tensor
            if count > 1:
                source = halves[index % 2][1][: sum(counts)]
                for into, (begin, length) in zip(source.split(counts), now, strict=True):
                    into.copy_(tensor[begin : begin + length])
            received = [counts[rank]] * size
            into = halves[index % 2][0][: sum(received)]
            call = Call("all_to_all", source, into, False, counts=counts, receive_counts=received)
            return SteppedWork(run_transfer(call, self.inner, self.record))

        ahead: SteppedWork | None = launch(0)
        for index in range(count):
            pending, ahead = ahead, launch(index + 1) if index + 1 < count else None
            self.ordered.started = ahead is None
            yield pending
            length = _cut(spans[rank], index, piece)[1]
            parts = halves[index % 2][0][: size * length].view(size, length).unbind()
            self._add(parts, self.output[index * piece :][:length])
        self._give(memory)

    def _add(self, parts: Sequence[Tensor], output: Tensor) -> Tensor:
        """Reduce the parts into `output`, and again for comparison. Return the checksum of the output."""
        first, second = (torch.zeros_like(self.record.recomputed) for _ in range(2))
        whole, operation = output, self.reduction
        flipped = operation != "sum" and output.dtype in SIGNED
        # torch does not compare unsigned integers of 16 bits or more. Signed integers are in the same order
        # if their first bits are flipped.
        if flipped:
            whole = output.view(SIGNED[output.dtype])
            parts = [_flip_first_bit(part.view(whole.dtype)) for part in parts]
        step = REDUCTION_BLOCK if whole.is_cpu else max(1, len(whole))
        spare = whole.new_empty(min(step, len(whole)))
        for begin in range(0, len(whole), step):
            blocks = [part[begin : begin + step] for part in parts]
            for into in (whole[begin : begin + step], spare[: len(blocks[0])]):
                reduce_block(blocks, into, operation, 0)
                if flipped:
                    _flip_first_bit(into)
            first += word_sum(whole[begin : begin + step])
            second += word_sum(spare[: len(blocks[0])])
        self.record.recomputed = self.record.recomputed + (first - second)
        return first

    def _take(self, elements: int) -> Tensor:
        """Borrow memory for `elements` elements that this rank receives; `_give` gives it back."""
        return self.scratch.take(elements, self.tensor)[:elements]

    def _give(self, memory: Tensor) -> None:
        self.scratch.give(memory)


def elements_per_round(tensor: Tensor, size: int) -> int:
    """Return the largest number of elements that one rank adds in a round, at least 1.

    Args:
        tensor: Tensor that is reduced; only its dtype matters.
        size: Number of ranks.
    """
    return max(1, HOST_ROUND_BYTES // tensor.itemsize // size)


def audited_scratch_bytes(elements: int, itemsize: int, size: int, scattered: bool) -> int:
    """Return the host memory, in bytes, that one audited reduction takes on each rank and keeps. Local.

    It is borrowed from the world's `ReductionScratch`, so later reductions of any group may use it again.
    Reductions that are in flight at the same time take it once each.

    Args:
        elements: Number of elements of each rank's input tensor.
        itemsize: Size of an element in bytes.
        size: Number of ranks.
        scattered: True for a reduce-scatter, False for an all-reduce.

    Returns:
        The memory, a power of two. It is 0 for a sum so small that every rank receives all inputs: their
        memory, at most SMALL_BYTES, is freed afterwards and not counted.
    """
    if elements * itemsize * size <= SMALL_BYTES:
        return 0
    share = -(-elements // size)
    piece = min(share, max(1, HOST_ROUND_BYTES // itemsize // size))
    rounds = -(-share // piece)
    memory = min(2, rounds) * size * piece * itemsize * (2 if scattered and rounds > 1 else 1)
    return 1 << (memory - 1).bit_length()


def _cut(span: ElementRange, index: int, piece: int) -> ElementRange:
    """Return the part of a span that belongs to a round."""
    begin, count = span
    first = min(index * piece, count)
    return begin + first, min(piece, count - first)


def _flip_first_bit(values: Tensor) -> Tensor:
    return values.bitwise_xor_(torch.iinfo(values.dtype).min)
