"""Reductions that add in rank order, built from data movement alone.

The order in which an MPI or NCCL library adds depends on its choice of algorithm, and so on message size,
number of ranks and version. Here each element has one owner, which receives it from all ranks (a direct
reduce-scatter) and adds in rank order. Half types are added in fp32 and rounded once at the end. An
all-reduce then gathers the sums. In a small one every rank receives everything instead, in one message.

`reduce_in_rank_order` is the entry. What moves the data is a `PieceMover`, such as `MpiTransport`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.comm.calls import Call, Reduction
from hpctrain.comm.transports.transport import (
    ElementRange,
    PieceExchange,
    Steps,
    TransportWork,
    flat_view,
    ranges_of_ranks,
)

SMALL_BYTES = 32 * 1024
"""Largest size of all ranks' tensors together, in bytes, for which every rank receives them all and adds."""

HOST_ROUND_BYTES = 8 * 1024 * 1024
"""Bytes that a rank receives in one round in CPU memory. Two rounds are in flight."""

DEVICE_ROUND_BYTES = 64 * 1024 * 1024
"""The same on a GPU."""

REDUCTION_BLOCK = 64 * 1024
"""Elements that are added at a time, so that the sums stay in the processor's cache."""

FUNCTIONS: Mapping[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

HALVES = frozenset({torch.float16, torch.bfloat16})
"""Floating-point types of 16 bits, also called half types. They are added in fp32."""

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed type of each unsigned one. torch cannot add unsigned numbers; signed sums have the same bits."""


class ReductionScratch:
    """Host memory that operations borrow. It is kept, since new memory would be paged in each time.

    Attributes:
        bytes: Current size.
        peak_bytes: Largest size so far.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._borrowed: dict[int, Tensor] = {}
        self.bytes = self.peak_bytes = 0

    def take(self, elements: int, like: Tensor) -> Tensor:
        """Borrow a flat tensor with at least `elements` elements, with the dtype and device of `like`. Local.

        Its values are arbitrary. It may be longer than asked for. The caller passes the same tensor to `give`
        when the operation is complete. On a GPU it is a new tensor from torch's own allocator, which is not
        counted.
        """
        if not like.is_cpu:
            return torch.empty(elements, dtype=like.dtype, device=like.device)
        needed = elements * like.itemsize
        for index, block in enumerate(self._free):
            if block.numel() >= needed:
                del self._free[index]
                break
        else:
            if self._free:
                self.bytes -= self._free.pop().numel()  # too small; the new block replaces it
            block = torch.empty(1 << max(needed - 1, 1).bit_length(), dtype=torch.uint8)
            self.bytes += block.numel()
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        self._borrowed[block.data_ptr()] = block
        return block.view(like.dtype)

    def give(self, tensor: Tensor) -> None:
        """Give back a tensor that `take` has returned, or a view of its beginning.

        Later operations may then borrow the memory.

        A tensor on a GPU is ignored. Local.
        """
        if tensor.is_cpu:
            insort(self._free, self._borrowed.pop(tensor.data_ptr()), key=Tensor.numel)


class PieceMover(Protocol):
    """Interface of the data movement from which reductions are built.

    `collect` is a collective operation that all ranks start in the order of the program, since it is the
    first step of a reduction. `exchange` and `share` are later steps, which ranks start at different times,
    with other operations in between. Their messages are therefore matched by the tag of the reduction.
    """

    rank: int
    size: int
    scratch: ReductionScratch

    def collect(self, tensor: Tensor, output: Tensor, blocking: bool) -> TransportWork | None:
        """Gather pieces of equal size from all ranks into `output`. Collective.

        Returns:
            Handle of the operation; None if it is complete, as it always is if `blocking`.
        """

    def exchange(self, pieces: PieceExchange, tag: int) -> TransportWork | None:
        """Start to send a piece to each rank, and to receive a piece from each rank. Collective.

        Returns:
            Handle of the operation; None if it is complete.
        """

    def share(
        self, tensor: Tensor, ranges: list[ElementRange], tag: int, blocking: bool
    ) -> TransportWork | None:
        """Gather `tensor` in place on all ranks. Collective.

        Args:
            tensor: Flat tensor.
            ranges: For each rank the range of `tensor` that it has; they follow each other.
            tag: Tag of the operation.
            blocking: True if the caller waits at once.

        Returns:
            Handle of the operation; None if it is complete.
        """

    def next_tag(self) -> int:
        """Return the message tag of the next operation, for its `exchange` and `share`. It sends nothing.

        All ranks call it once per operation, in the same order of operations.
        """


def reduce_in_rank_order(mover: PieceMover, call: Call) -> Steps:
    """Return the steps of an all_reduce, a reduce or a reduce_scatter. Collective over the ranks of `mover`.

    Nothing happens before the first step is taken. The results are in the tensors of the call: `call.output`
    of a reduce_scatter, which may be this rank's elements of the tensor, otherwise `call.tensor`. Nothing
    else is overwritten: neither the other elements of the tensor of a reduce_scatter, nor the tensors of
    other ranks than the root of a reduce.

    Args:
        mover: Transport that moves the pieces and implements PieceMover: an MpiTransport or a
            ProcessGroupTransport.
        call: The call, with its tensors.
    """
    tensor, reduction, rank, size = flat_view(call.tensor), call.reduction, mover.rank, mover.size
    assert reduction is not None
    is_scattered = call.operation == "reduce_scatter"
    output = flat_view(call.output) if is_scattered else tensor
    if tensor.nbytes * size <= SMALL_BYTES:
        parts = tensor.new_empty((size, len(tensor)))
        yield mover.collect(tensor, parts, call.blocking)
        if is_scattered:
            begin, count = ranges_of_ranks(call.counts, tensor, size)[rank]
            parts = parts[:, begin : begin + count]
        if call.root in (-1, rank):
            reduce_parts(parts.unbind(), output, reduction, rank)
        return
    tag = mover.next_tag()
    if call.operation == "reduce":
        yield from _reduce_to_root(mover, tensor, call.root, reduction, tag)
        return
    counts = call.counts if is_scattered else equal_counts(len(tensor), size)
    ranges = ranges_of_ranks(counts, tensor, size)
    begin, count = ranges[rank]
    sums = output if is_scattered else tensor[begin : begin + count]
    yield from _scatter_sums(mover, tensor, sums, ranges, reduction, tag)
    if not is_scattered:
        yield mover.share(tensor, ranges, tag, call.blocking)


def _reduce_to_root(mover: PieceMover, tensor: Tensor, root: int, reduction: Reduction, tag: int) -> Steps:
    """Reduce into the `tensor` of `root`, in blocks of which each rank reduces a piece and sends it there."""
    size, rank = mover.size, mover.rank
    nothing = [(0, 0)] * size
    for block in tensor.split(size * _round_elements(tensor)):
        ranges = ranges_of_ranks(equal_counts(len(block), size), block, size)
        begin, count = ranges[rank]
        if rank == root:
            yield from _scatter_sums(mover, block, block[begin : begin + count], ranges, reduction, tag)
            ranges[root] = (0, 0)
            yield mover.exchange(PieceExchange(block, nothing, block, ranges), tag)
        else:
            piece = mover.scratch.take(count, tensor)
            yield from _scatter_sums(mover, block, piece, ranges, reduction, tag)
            sends = list(nothing)
            sends[root] = (0, count)
            yield mover.exchange(PieceExchange(piece, sends, block, nothing), tag)
            mover.scratch.give(piece)


def _scatter_sums(
    mover: PieceMover,
    tensor: Tensor,
    output: Tensor,
    ranges: Sequence[ElementRange],
    reduction: Reduction,
    tag: int,
) -> Steps:
    """Reduce this rank's range of `tensor` into `output` by a direct reduce-scatter.

    It runs in rounds of bounded memory. The messages of the next round are in flight while this one is added.
    """
    rank, size = mover.rank, mover.size
    longest = max(count for _, count in ranges)
    piece = min(longest, max(1, _round_elements(tensor) // (size - 1)))
    rounds = -(-longest // piece) if longest else 0
    buffers = mover.scratch.take(min(rounds, 2) * (size - 1) * piece, tensor)
    slots = [peer - (peer > rank) for peer in range(size)]

    def start_round(index: int) -> TransportWork | None:
        first = index * piece
        lengths = [min(max(count - first, 0), piece) for _, count in ranges]
        sends = [(begin + first, length) for (begin, _), length in zip(ranges, lengths, strict=True)]
        base = index % 2 * (size - 1) * piece
        receives = [(base + slot * piece, lengths[rank]) for slot in slots]
        sends[rank] = receives[rank] = (0, 0)
        return mover.exchange(PieceExchange(tensor, sends, buffers, receives), tag)

    begin, count = ranges[rank]
    next_work = start_round(0) if rounds else None
    for index in range(rounds):
        work, next_work = next_work, start_round(index + 1) if index + 1 < rounds else None
        yield work
        first = index * piece
        length = min(max(count - first, 0), piece)
        if length:
            base = index % 2 * (size - 1) * piece
            starts = [base + slot * piece for slot in slots]
            parts = [buffers[start : start + length] for start in starts]
            parts[rank] = tensor[begin + first : begin + first + length]
            reduce_parts(parts, output[first : first + length], reduction, rank)
    mover.scratch.give(buffers)


def reduce_parts(parts: Sequence[Tensor], output: Tensor, reduction: Reduction, output_part: int) -> None:
    """Reduce at least two parts, in their order, into `output`. 16-bit floats are added in fp32.

    Args:
        parts: Flat tensors of equal length and dtype, one per rank. All but `parts[output_part]` may be
            overwritten.
        output: Flat tensor of the same length and dtype. It may share memory with `parts[output_part]`, and
            with no other part.
        reduction: "sum", "max" or "min".
        output_part: Index of a part, which may share memory with `output`, and is not changed if it does not.
    """
    elements = output.numel()
    if elements <= REDUCTION_BLOCK or not output.is_cpu:
        reduce_block(parts, output, reduction, output_part)
        return
    for begin in range(0, elements, REDUCTION_BLOCK):
        end = begin + REDUCTION_BLOCK
        reduce_block([part[begin:end] for part in parts], output[begin:end], reduction, output_part)


def reduce_block(
    parts: Sequence[Tensor],
    output: Tensor,
    reduction: Reduction,
    output_part: int,
    spare: Tensor | None = None,
) -> None:
    """Reduce at least two parts, in their order, into `output`, all elements at once.

    `reduce_parts` calls it for one block of elements after another.

    Args:
        parts: Flat tensors of equal length and dtype. Without `spare`, `parts[0]` may be overwritten; other
            parts never are, unless they are the memory of `output`.
        output: Flat tensor; may be the memory of `parts[output_part]`, and of no other part.
        reduction: "sum", "max" or "min".
        output_part: Index of the part that may share memory with `output`.
        spare: Memory for intermediate results with the dtype of `output` and at least its length. With it,
            only `output` is overwritten. Pass None for unsigned integers of 16 bits or more.
    """
    if len(parts) == 2 and output.dtype not in SIGNED:
        FUNCTIONS[reduction](*parts, out=output)
        return
    if reduction == "sum" and output.dtype in HALVES and len(parts) > 2:
        # Two halves need no fp32 memory: torch adds them in fp32 and rounds once.
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        output.copy_(total)
        return
    if output.dtype in SIGNED:
        signed = SIGNED[output.dtype]
        parts, output = [part.view(signed) for part in parts], output.view(signed)
        if reduction != "sum":
            lowest = torch.iinfo(signed).min  # with another sign bit, signed numbers are in the same order
            shifted = torch.stack([part ^ lowest for part in parts])
            output.copy_((shifted.amax(0) if reduction == "max" else shifted.amin(0)) ^ lowest)
            return
    function = FUNCTIONS[reduction]
    total = parts[0]
    # Memory that no later part needs.
    intermediate = output if output_part < 2 else parts[0] if spare is None else spare[: len(output)]
    for index, part in enumerate(parts[1:], 1):
        total = function(total, part, out=output if index == len(parts) - 1 else intermediate)


def equal_counts(elements: int, size: int) -> list[int]:
    """Return the number of elements of each rank, by rank, if elements are divided evenly among ranks. Local.

    The first `elements % size` ranks have one element more than the others. In a reduction, each rank adds up
    the elements of its own part.

    Args:
        elements: Number of elements of all ranks.
        size: Number of ranks, at least 1.
    """
    share, rest = divmod(elements, size)
    return [share + (rank < rest) for rank in range(size)]


def reduction_scratch_bytes(elements: int, itemsize: int, size: int) -> int:
    """Return the host memory, in bytes, that `reduce_in_rank_order` takes on each rank and keeps. Local.

    Later sums use the same memory. The result holds for an all_reduce and for a reduce_scatter of equal
    pieces, in host memory. Use `mpi_scratch_bytes` for an MpiTransport, which leaves some sums to MPI.

    Args:
        elements: Number of elements of the tensor of each rank.
        itemsize: Bytes of an element.
        size: Number of ranks, at least 2.

    Returns:
        The memory, a power of two; 0 for a sum that is so small that every rank receives all inputs.
    """
    if elements * itemsize * size <= SMALL_BYTES:
        return 0
    share = -(-elements // size)
    piece = min(share, max(1, HOST_ROUND_BYTES // itemsize // (size - 1)))
    received = min(2, -(-share // piece)) * (size - 1) * piece * itemsize
    return 1 << (received - 1).bit_length()


def _round_elements(tensor: Tensor) -> int:
    return max(1, (HOST_ROUND_BYTES if tensor.is_cpu else DEVICE_ROUND_BYTES) // tensor.itemsize)
