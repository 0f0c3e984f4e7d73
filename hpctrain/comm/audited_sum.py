"""Sums whose addends are seen as they arrive: moved by another transport, added here, in rank order, twice.

As in `reduction`, each element has one owner, who receives it from all ranks and adds; an all-reduce then
gathers the sums, and a small one lets every rank receive everything. The bits are those of the transports'
own sums. Everything moves through calls of the inner transport, in one order on all ranks, and in rounds of
bounded memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.calls import Call
from hpctrain.comm.moved import MovedRecord, moved
from hpctrain.comm.sums import fingerprint
from hpctrain.comm.transports.mpi import flat_view
from hpctrain.comm.transports.reduction import (
    BLOCK,
    ROUND_BYTES,
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
    ranges_of_ranks,
)
from hpctrain.comm.turns import Turn


class AuditedSum:
    """One reduction; `record` is of its call."""

    def __init__(
        self, call: Call, inner: Transport, scratch: ReductionScratch, record: MovedRecord, turn: Turn
    ) -> None:
        assert call.tensor is not None and call.reduced is not None
        self.call, self.inner, self.scratch, self.record, self.turn = call, inner, scratch, record, turn
        self.rank, self.size = inner.rank, inner.size
        self.tensor, self.operation = flat_view(call.tensor), call.reduced
        self.output = None if call.output is None else flat_view(call.output)

    def steps(self) -> Steps:
        """From what the ranks give to the results."""
        if self.tensor.nbytes * self.size <= SMALL_BYTES:
            yield from self._of_everything()
        elif self.call.operation == "reduce_scatter":
            yield from self._to_owners()
        else:
            yield from self._to_all()

    def _of_everything(self) -> Steps:
        """Each rank receives all, and adds what it wants of it."""
        tensor = self.tensor
        parts = tensor.new_empty((self.size, tensor.numel()))
        call = Call("all_gather", tensor, parts.view(-1), self.call.blocking, bytes=parts.nbytes)
        pending = SteppedWork(moved(call, self.inner, self.record))
        self.turn.started = True
        yield pending
        if self.output is None:
            return
        begin, count = 0, tensor.numel()
        if self.call.operation == "reduce_scatter":
            begin, count = ranges_of_ranks(self.call.counts, tensor, self.size)[self.rank]
        self._add(parts[:, begin : begin + count].unbind(), self.output)

    def _to_all(self) -> Steps:
        """Each rank adds a piece of every round, and gives it to all, or to the root."""
        root, size, rank = self.call.root, self.size, self.rank
        rounds = self.tensor.split(size * piece_elements(self.tensor, size))
        longest = equal_counts(rounds[0].numel(), size)[0]
        room = self._take(min(2, len(rounds)) * (size + (root >= 0)) * longest)
        halves = room.view(-1, (size + (root >= 0)) * longest)

        def launch(index: int) -> SteppedWork:
            counts = equal_counts(rounds[index].numel(), size)
            received = [counts[rank]] * size
            into = halves[index % 2][: sum(received)]
            call = Call("all_to_all", rounds[index], into, False, counts=counts, received=received)
            return SteppedWork(moved(call, self.inner, self.record))

        results: list[TransportWork] = []
        ahead: SteppedWork | None = launch(0)
        for index, block in enumerate(rounds):
            pending, ahead = ahead, launch(index + 1) if index + 1 < len(rounds) else None
            yield pending
            counts = equal_counts(block.numel(), size)
            begin, count = ranges_of_ranks(counts, block, size)[rank]
            own = block[begin : begin + count]
            if root not in (-1, rank):
                own = halves[index % 2][size * longest :][:count]
            given = self._add(halves[index % 2][: size * count].view(size, count).unbind(), own)
            call = self._result(own, block, counts, self.call.blocking and len(rounds) == 1)
            target = range(size) if root < 0 else [root]
            told = torch.zeros_like(self.record.given)
            for peer in target:
                if peer != rank:
                    told[peer] = given
            results.append(SteppedWork(moved(call, self.inner, self.record, told)))
            self.turn.started = ahead is None
            if root >= 0:
                yield results.pop()
        yield ParallelWork(results)
        self._give(room)

    def _result(self, own: Tensor, block: Tensor, counts: Sequence[int], blocking: bool) -> Call:
        """What hands on this rank's sums of a round."""
        root = self.call.root
        if root < 0:
            return Call("all_gather", own, block, blocking, bytes=block.nbytes, counts=counts)
        output = block if self.rank == root else None
        return Call("gather", own, output, blocking, bytes=block.nbytes, root=root, counts=counts)

    def _to_owners(self) -> Steps:
        """Each rank adds its own piece. Of several rounds what is sent is brought together first."""
        size, rank, tensor = self.size, self.rank, self.tensor
        assert self.output is not None
        spans = ranges_of_ranks(self.call.counts, tensor, size)
        longest = max(count for _, count in spans)
        piece = min(longest, piece_elements(tensor, size))
        count = -(-longest // piece)
        room = self._take(min(2, count) * size * piece * (2 if count > 1 else 1))
        halves = room.view(min(2, count), -1, size * piece)

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
            call = Call("all_to_all", source, into, False, counts=counts, received=received)
            return SteppedWork(moved(call, self.inner, self.record))

        ahead: SteppedWork | None = launch(0)
        for index in range(count):
            pending, ahead = ahead, launch(index + 1) if index + 1 < count else None
            self.turn.started = ahead is None
            yield pending
            length = _cut(spans[rank], index, piece)[1]
            parts = halves[index % 2][0][: size * length].view(size, length).unbind()
            self._add(parts, self.output[index * piece :][:length])
        self._give(room)

    def _add(self, parts: Sequence[Tensor], output: Tensor) -> Tensor:
        """Reduce the parts into `output`, and again to compare; the fingerprint of the output."""
        first, second = (torch.zeros_like(self.record.again) for _ in range(2))
        whole, operation = output, self.operation
        turned = operation != "sum" and output.dtype in SIGNED
        if turned:  # torch orders signed integers alone, and these as the others once their first bits are
            whole = output.view(SIGNED[output.dtype])
            parts = [_turn(part.view(whole.dtype)) for part in parts]
        step = BLOCK if whole.is_cpu else max(1, len(whole))
        spare = whole.new_empty(min(step, len(whole)))
        for begin in range(0, len(whole), step):
            blocks = [part[begin : begin + step] for part in parts]
            for into in (whole[begin : begin + step], spare[: len(blocks[0])]):
                reduce_block(blocks, into, operation, 0)
                if turned:
                    _turn(into)
            first += fingerprint(whole[begin : begin + step])
            second += fingerprint(spare[: len(blocks[0])])
        self.record.again = self.record.again + (first - second)
        return first

    def _take(self, elements: int) -> Tensor:
        """Memory for what comes; on a GPU this operation's own."""
        return self.scratch.take(elements, self.tensor)[:elements]

    def _give(self, room: Tensor) -> None:
        self.scratch.give(room)


def piece_elements(tensor: Tensor, size: int) -> int:
    """Elements that a rank adds in one round."""
    return max(1, ROUND_BYTES // tensor.itemsize // size)


def scratch_bytes(elements: int, itemsize: int, size: int, scattered: bool) -> int:
    """Host memory that a sum of so many elements over `size` ranks takes, and keeps."""
    if elements * itemsize * size <= SMALL_BYTES:
        return 0
    share = -(-elements // size)
    piece = min(share, max(1, ROUND_BYTES // itemsize // size))
    rounds = -(-share // piece)
    held = min(2, rounds) * size * piece * itemsize * (2 if scattered and rounds > 1 else 1)
    return 1 << (held - 1).bit_length()


def _cut(span: ElementRange, index: int, piece: int) -> ElementRange:
    """A round's part of a span."""
    begin, count = span
    first = min(index * piece, count)
    return begin + first, min(piece, count - first)


def _turn(values: Tensor) -> Tensor:
    return values.bitwise_xor_(torch.iinfo(values.dtype).min)
