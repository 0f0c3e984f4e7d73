"""Reductions that add in rank order, made from movement alone.

Which order an MPI or NCCL library adds in depends on its choice of algorithm, and so on message size,
ranks and version. Here each element has one owner, who receives it from all ranks (a direct
reduce-scatter) and adds in rank order, half types in fp32 with one rounding at the end. An all-reduce
then shares the sums. A small one lets every rank receive everything instead, in one message.

Every function takes flat tensors and is a generator of the operations under way (see `Chain`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.comm.calls import Operation
from hpctrain.comm.transports.transport import ElementRange, Steps, TransportWork, ranges_of_ranks

SMALL_BYTES = 32 * 1024  # received in all, up to which every rank receives everything
ROUND_BYTES = 8 * 1024 * 1024  # received in one round; two rounds are in flight
DEVICE_ROUND_BYTES = 64 * 1024 * 1024  # the same on a GPU
BLOCK = 64 * 1024  # elements added at a time, so that sums stay in the cache

FUNCTIONS: Mapping[Operation, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

HALVES = frozenset({torch.float16, torch.bfloat16})

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class ReductionScratch:
    """Host memory kept from one operation to the next: fresh memory would be paged in anew each time.

    `bytes` are there now, `peak_bytes` were at the most.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}
        self.bytes = self.peak_bytes = 0

    def take(self, elements: int, like: Tensor) -> Tensor:
        """A flat tensor of at least so many elements, of the dtype and device of `like`; give it back."""
        if not like.is_cpu:
            return torch.empty(elements, dtype=like.dtype, device=like.device)
        needed = elements * like.itemsize
        for index, block in enumerate(self._free):
            if block.numel() >= needed:
                del self._free[index]
                break
        else:
            if self._free:
                self.bytes -= self._free.pop().numel()  # too small; a larger one takes its place
            block = torch.empty(1 << max(needed - 1, 1).bit_length(), dtype=torch.uint8)
            self.bytes += block.numel()
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        self._lent[block.data_ptr()] = block
        return block.view(like.dtype)

    def give(self, tensor: Tensor) -> None:
        """Take memory back."""
        if tensor.is_cpu:
            insort(self._free, self._lent.pop(tensor.data_ptr()), key=Tensor.numel)


class PieceMover(Protocol):
    """Data movements from which reductions are built.

    `exchange` and `share` may be started at different times on different ranks, between other operations.
    `collect` comes first in a reduction and is started in the order of the program.
    """

    rank: int
    size: int
    scratch: ReductionScratch

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> TransportWork | None:
        """Gather pieces of equal size from all ranks."""

    def exchange(
        self,
        source: Tensor,
        sends: Sequence[ElementRange],
        target: Tensor,
        receives: Sequence[ElementRange],
        tag: int,
    ) -> TransportWork | None:
        """Send one span of `source` to each rank, and receive one span of `target` from each rank."""

    def share(
        self, tensor: Tensor, spans: Sequence[ElementRange], tag: int, blocking: bool
    ) -> TransportWork | None:
        """Gather the consecutive spans of `tensor` from all ranks, in place."""

    def next_tag(self) -> int:
        """Return the message tag of the next operation, which is the same on all ranks."""


def reduce_parts(parts: Sequence[Tensor], output: Tensor, operation: Operation, own: int) -> None:
    """Reduce the parts, in their order, into `output`.

    `output` may be the very memory of `parts[own]`; other parts are overwritten freely.
    """
    elements = output.numel()
    if elements <= BLOCK or not output.is_cpu:
        reduce_block(parts, output, operation, own)
        return
    for begin in range(0, elements, BLOCK):
        end = begin + BLOCK
        reduce_block([part[begin:end] for part in parts], output[begin:end], operation, own)


def reduce_block(
    parts: Sequence[Tensor], output: Tensor, operation: Operation, own: int, spare: Tensor | None = None
) -> None:
    """As `fold`, at once; where there is `spare` memory for it, no part but the own one is overwritten."""
    if len(parts) == 2 and output.dtype not in SIGNED:
        FUNCTIONS[operation](*parts, out=output)
        return
    if operation == "sum" and output.dtype in HALVES and len(parts) > 2:
        # Two halves need no fp32 memory: torch adds them in fp32 and rounds once.
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        output.copy_(total)
        return
    if output.dtype in SIGNED:  # torch adds no unsigned numbers; sums of signed ones have the same bits
        assert operation == "sum", f"no {operation} of {output.dtype} in place or beyond the message limit"
        parts, output = [part.view(SIGNED[part.dtype]) for part in parts], output.view(SIGNED[output.dtype])
    function = FUNCTIONS[operation]
    total = parts[0]
    # Memory that no later part needs.
    between = output if own < 2 else parts[0] if spare is None else spare[: len(output)]
    for index, part in enumerate(parts[1:], 1):
        total = function(total, part, out=output if index == len(parts) - 1 else between)


def equal_counts(elements: int, size: int) -> list[int]:
    """Elements of each of `size` ranks that share so many."""
    share, rest = divmod(elements, size)
    return [share + (rank < rest) for rank in range(size)]


def _round_elements(tensor: Tensor) -> int:
    return max(1, (ROUND_BYTES if tensor.is_cpu else DEVICE_ROUND_BYTES) // tensor.itemsize)


def scratch_bytes(elements: int, itemsize: int, size: int) -> int:
    """Host memory kept for what a sum of so many elements over `size` ranks receives at a time."""
    if elements * itemsize * size <= SMALL_BYTES:
        return 0
    share = -(-elements // size)
    piece = min(share, max(1, ROUND_BYTES // itemsize // (size - 1)))
    received = min(2, -(-share // piece)) * (size - 1) * piece * itemsize
    return 1 << (received - 1).bit_length()


def all_reduce(mover: PieceMover, tensor: Tensor, operation: Operation, blocking: bool) -> Steps:
    """Reduce `tensor` in place on every rank."""
    elements, size = tensor.numel(), mover.size
    if elements * tensor.itemsize * size <= SMALL_BYTES:
        parts = tensor.new_empty((size, elements))
        yield mover.collect(tensor, parts, blocking)
        reduce_parts(parts.unbind(), tensor, operation, mover.rank)
        return
    spans = ranges_of_ranks(equal_counts(elements, size), tensor, size)
    begin, count = spans[mover.rank]
    tag = mover.next_tag()
    yield from _scatter_sums(mover, tensor, tensor[begin : begin + count], spans, operation, tag)
    yield mover.share(tensor, spans, tag, blocking)


def reduce_scatter(
    mover: PieceMover,
    tensor: Tensor,
    output: Tensor,
    counts: Sequence[int] | None,
    operation: Operation,
    blocking: bool,
) -> Steps:
    """Reduce `tensor` into `output`, this rank's `counts[rank]` elements of it (which it may alias)."""
    elements, size = tensor.numel(), mover.size
    spans = ranges_of_ranks(counts, tensor, size)
    if elements * tensor.itemsize * size <= SMALL_BYTES:
        begin, count = spans[mover.rank]
        parts = tensor.new_empty((size, elements))
        yield mover.collect(tensor, parts, blocking)
        reduce_parts(parts[:, begin : begin + count].unbind(), output, operation, mover.rank)
        return
    yield from _scatter_sums(mover, tensor, output, spans, operation, mover.next_tag())


def reduce(mover: PieceMover, tensor: Tensor, root: int, operation: Operation, blocking: bool) -> Steps:
    """Reduce into root's `tensor`; the others' stay as they are."""
    elements, size, rank = tensor.numel(), mover.size, mover.rank
    if elements * tensor.itemsize * size <= SMALL_BYTES:
        parts = tensor.new_empty((size, elements))
        yield mover.collect(tensor, parts, blocking)
        if rank == root:
            reduce_parts(parts.unbind(), tensor, operation, rank)
        return
    tag = mover.next_tag()
    stride = size * _round_elements(tensor)
    none = [(0, 0)] * size
    for first in range(0, elements, stride):
        block = tensor[first : first + stride]
        spans = ranges_of_ranks(equal_counts(block.numel(), size), block, size)
        begin, count = spans[rank]
        if rank == root:
            yield from _scatter_sums(mover, block, block[begin : begin + count], spans, operation, tag)
            spans[root] = (0, 0)
            yield mover.exchange(block, none, block, spans, tag)
        else:
            piece = mover.scratch.take(count, tensor)
            yield from _scatter_sums(mover, block, piece, spans, operation, tag)
            sends = list(none)
            sends[root] = (0, count)
            yield mover.exchange(piece, sends, block, none, tag)
            mover.scratch.give(piece)


def _scatter_sums(
    mover: PieceMover,
    tensor: Tensor,
    output: Tensor,
    spans: Sequence[ElementRange],
    operation: Operation,
    tag: int,
) -> Steps:
    """The direct reduce-scatter: rank r's span of `tensor`, reduced, becomes its `output`.

    In rounds of bounded memory, the next round's messages under way while this one's are added.
    """
    rank, size = mover.rank, mover.size
    longest = max(count for _, count in spans)
    piece = min(longest, max(1, _round_elements(tensor) // (size - 1)))
    rounds = -(-longest // piece) if longest else 0
    buffers = mover.scratch.take(min(rounds, 2) * (size - 1) * piece, tensor)
    slots = [peer - (peer > rank) for peer in range(size)]

    def launch(index: int) -> TransportWork | None:
        first = index * piece
        lengths = [min(max(count - first, 0), piece) for _, count in spans]
        sends = [(begin + first, length) for (begin, _), length in zip(spans, lengths, strict=True)]
        base = index % 2 * (size - 1) * piece
        receives = [(base + slot * piece, lengths[rank]) for slot in slots]
        sends[rank] = receives[rank] = (0, 0)
        return mover.exchange(tensor, sends, buffers, receives, tag)

    begin, count = spans[rank]
    ahead = launch(0) if rounds else None
    for index in range(rounds):
        pending, ahead = ahead, launch(index + 1) if index + 1 < rounds else None
        yield pending
        first = index * piece
        length = min(max(count - first, 0), piece)
        if length:
            base = index % 2 * (size - 1) * piece
            starts = [base + slot * piece for slot in slots]
            parts = [buffers[start : start + length] for start in starts]
            parts[rank] = tensor[begin + first : begin + first + length]
            reduce_parts(parts, output[first : first + length], operation, rank)
    mover.scratch.give(buffers)
