"""Blocks of elements that are encoded together, and the places of their codes.

Blocks begin at each parameter's first element. So the code of a parameter depends on that parameter alone,
although another rank may hold it next to others, or split it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.state import StateTensor, rank_state

Span = tuple[int, int]
"""Begin and end of a range."""


@dataclass(frozen=True)
class ParameterBlocks:
    """Neighbouring elements of one parameter, and their places in the parameter, bucket and blocks.

    Attributes:
        segment: Segment of the parameter; None for values that are not in a bucket, and have no state.
        offset: Index of the first element in the parameter.
        start: Index of the first element in the bucket.
        first: Index of the first element in the flat blocks.
        length: Number of elements.
    """

    segment: BucketSegment | None
    offset: int
    start: int
    first: int
    length: int

    def within(self, first: int, last: int) -> ParameterBlocks:
        """Return those of the elements whose index in the flat blocks is from `first` to `last - 1`."""
        begin = max(self.first, first)
        length = max(0, min(self.first + self.length, last) - begin)
        skipped = begin - self.first
        return ParameterBlocks(self.segment, self.offset + skipped, self.start + skipped, begin, length)


class CompressionBlocks:
    """Blocks of BLOCK elements; each parameter's last one is filled up with zeros.

    Parameters that are not trained have none, nor has the padding that follows a parameter's last row.

    Attributes:
        pieces: Elements of each parameter.
        count: Number of blocks.
        elements: Number of elements of all blocks.
        counts: Number of elements of parameters in each block, fp32 [count].
    """

    def __init__(self, pieces: Sequence[ParameterBlocks], count: int, device: torch.device) -> None:
        self.pieces, self.count = pieces, count
        self.elements = count * BLOCK
        ends = (divmod(piece.first + piece.length, BLOCK) for piece in pieces)
        # Use host memory: on the meta device, as in plans, torch would load its compiler.
        host = torch.device("cpu")
        tails = torch.tensor([end for end in ends if end[1]], dtype=torch.int64, device=host)
        places, rests = tails.view(-1, 2).unbind(1)
        in_tail = torch.arange(BLOCK, device=host) < rests.unsqueeze(1)
        counts = torch.full((count,), float(BLOCK), device=host)
        counts[places] = rests.float()
        self._tails, self._in_tail, self.counts = (each.to(device) for each in (places, in_tail, counts))

    @staticmethod
    def of(bucket: Bucket) -> CompressionBlocks:
        """Return the blocks of all trained parameters of a bucket, each of which begins a block."""
        pieces, count = [], 0
        for segment in bucket.segments:
            shard = segment.parameter.shard
            length = shard.elements_of_real_rows
            if segment.parameter.requires_grad and length:
                pieces.append(ParameterBlocks(segment, 0, segment.start, count * BLOCK, length))
                count += -(-length // BLOCK)
        return CompressionBlocks(pieces, count, bucket.sharding.group.device)

    @staticmethod
    def of_lengths(lengths: Iterable[int], device: torch.device) -> CompressionBlocks:
        """Return the blocks of flat values that consist of adjacent parts, each of which begins a block.

        Args:
            lengths: Number of elements of each part, such as a parameter.
            device: Device of the values.
        """
        pieces, count, start = [], 0, 0
        for length in lengths:
            pieces.append(ParameterBlocks(None, 0, start, count * BLOCK, length))
            count += -(-length // BLOCK)
            start += length
        return CompressionBlocks(pieces, count, device)

    def part(self, span: Span) -> CompressionBlocks:
        """Return only the blocks of a range, counted from its first block."""
        first, last = (block * BLOCK for block in span)
        parts = (piece.within(first, last) for piece in self.pieces)
        pieces = [replace(part, first=part.first - first) for part in parts if part.length]
        return CompressionBlocks(pieces, span[1] - span[0], self.counts.device)

    def equal_spans(self, size: int) -> list[Span]:
        """Return a range of blocks for each of `size` ranks, of about equal length, the longest one first."""
        borders = [-(-self.count * rank // size) for rank in range(size + 1)]
        return list(pairwise(borders))

    def span_of(self, part: slice) -> Span:
        """Return the range of blocks that contain an element of `part`, a range of the bucket."""
        pieces = list(self._pieces_in(part))
        if not pieces:
            return 0, 0
        return pieces[0].first // BLOCK, -(-(pieces[-1].first + pieces[-1].length) // BLOCK)

    def matching_views(self, blocks: Tensor, flat: Tensor, part: slice) -> tuple[list[Tensor], list[Tensor]]:
        """Return, for each parameter in `part`, views of its elements in `blocks` and in `flat`.

        Both views have the same elements in the same order. The caller copies or adds between them.

        Args:
            blocks: Elements of all blocks, flat.
            flat: Elements of `part`, flat.
            part: Part of the bucket.

        Returns:
            The views in `blocks`, and the views in `flat`.
        """
        pieces = list(self._pieces_in(part))
        of_blocks = [blocks[piece.first : piece.first + piece.length] for piece in pieces]
        of_flat = [flat[piece.start - part.start :][: piece.length] for piece in pieces]
        return of_blocks, of_flat

    def clear_tails(self, blocks: Tensor) -> Tensor:
        """Zero the elements of flat `blocks` that belong to no parameter, in place, and return `blocks`."""
        rows = blocks.view(self.count, BLOCK)
        rows[self._tails] = rows[self._tails].where(self._in_tail, 0)
        return blocks

    def code_spans(self, width: int, scale: int, span: Span) -> Iterator[Span]:
        """Yield the byte ranges, within the code of all blocks, that belong to the blocks of a span.

        The code has first `width` bytes of each block for its elements, then `scale` bytes of each block.
        Bytes that only fill blocks up are omitted.

        Args:
            width: Bytes of a block's values.
            scale: Bytes of a block's scale.
            span: The blocks.
        """
        begin = end = 0
        for piece in self.pieces:
            part = piece.within(span[0] * BLOCK, span[1] * BLOCK)
            first = part.first * width // BLOCK
            if part.length and first != end:
                if end > begin:
                    yield begin, end
                begin = first
            if part.length:
                end = -(-(part.first + part.length) * width // BLOCK)
        if end > begin:
            yield begin, end
        if scale and span[1] > span[0]:
            yield self.count * width + span[0] * scale, self.count * width + span[1] * scale

    def state_of_ranks(
        self, kind: str, blocks: Tensor, bucket: Bucket, owned: bool = False
    ) -> Iterator[StateTensor]:
        """Yield a residual that each rank has of its own, by parameter: stored as rows [ranks, ...].

        Args:
            kind: Kind of the state.
            blocks: The residual, in flat blocks.
            bucket: The bucket.
            owned: True if one more row follows for each replica, which `state_of_owner` yields.
        """
        for piece in self.pieces:
            assert piece.segment is not None
            values = blocks[piece.first : piece.first + piece.length]
            yield rank_state(kind, piece.segment, values, bucket, piece.offset, further_rows=int(owned))

    def state_of_owner(self, kind: str, blocks: Tensor, bucket: Bucket) -> Iterator[StateTensor]:
        """Yield the residual of sums that this rank owns, by parameter: stored as the last row.

        If a resumed run has another number of ranks, or sums without owners, one of its ranks adds this row
        to its own residual.

        Args:
            kind: Kind of the state, the same as that of `state_of_ranks`.
            blocks: The residual, in flat blocks; `self` has only the blocks that this rank owns.
            bucket: The bucket.
        """
        group, replicas = bucket.sharding.group, bucket.sharding.replicas
        rows = group.size + 1
        for piece in self.pieces:
            assert piece.segment is not None
            replication = piece.segment.replication
            shard = piece.segment.parameter.shard
            shard = shard.stacked(replicas.rank * rows + group.size, replicas.size * rows)
            values = blocks[piece.first : piece.first + piece.length]
            # The first and last stages split tied embeddings at different places, so only one of them writes.
            written, copy = replication.stage_copy == 0, (replication.holders.rank, replication.holders.size)
            yield StateTensor(kind, shard, values, piece.offset, copy, written, "as a sum")

    def _pieces_in(self, part: slice) -> Iterator[ParameterBlocks]:
        """Yield the elements of each parameter that are in `part`, a range of the bucket."""
        for piece in self.pieces:
            distance = piece.first - piece.start
            clipped = piece.within(part.start + distance, part.stop + distance)
            if clipped.length:
                yield clipped


def read_spans(code: Tensor, spans: Iterable[Span]) -> Tensor:
    """Return the bytes of ranges of a code [bytes], concatenated, such as those of `code_spans`."""
    return torch.cat([code[first:last] for first, last in spans] or [code[:0]])


def write_spans(code: Tensor, spans: Sequence[Span], data: Tensor) -> Tensor:
    """Write bytes that another rank read by `read_spans` into the same ranges of a code, in place.

    Args:
        code: Code of blocks, or one code for each of several ranks: [..., bytes].
        spans: Ranges of bytes of a code, such as those of `code_spans`.
        data: Bytes of these ranges, concatenated, [..., total length of the ranges].

    Returns:
        The code.
    """
    lengths = [last - first for first, last in spans]
    if lengths:
        places = [code[..., first:last] for first, last in spans]
        torch._foreach_copy_(places, list(data.split(lengths, -1)))
    return code
