"""A bucket's elements in blocks that begin at each parameter's first one, and where their codes lie.

What a parameter's elements are coded to depends on that parameter alone: another rank may hold it beside
others, and cut it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.state import StateTensor

Span = tuple[int, int]
"""From where, and up to where."""


@dataclass(frozen=True)
class ParameterBlocks:
    """`length` elements of a parameter from its number `offset` on: they are the elements `start`, ... of the
    bucket, and the elements `first`, ... of the blocks. What has no state needs no `segment`.
    """

    segment: BucketSegment | None
    offset: int
    start: int
    first: int
    length: int

    def within(self, first: int, last: int) -> ParameterBlocks:
        """As much of it as the elements `first` to `last` of the blocks have."""
        begin = max(self.first, first)
        length = max(0, min(self.first + self.length, last) - begin)
        skipped = begin - self.first
        return ParameterBlocks(self.segment, self.offset + skipped, self.start + skipped, begin, length)


class CompressionBlocks:
    """`count` blocks of BLOCK elements, each parameter's last one filled up with zeros.

    What is not trained has none, nor has the padding behind a parameter's last row.
    """

    def __init__(self, pieces: Sequence[ParameterBlocks], count: int, device: torch.device) -> None:
        self.pieces, self.count = pieces, count
        self.elements = count * BLOCK
        tails = [
            ((piece.first + piece.length) // BLOCK, rest)
            for piece in pieces
            if (rest := (piece.first + piece.length) % BLOCK)
        ]
        # Made in host memory: of what a plan computes by shapes alone, torch would load its compiler.
        host = torch.device("cpu")
        places = torch.tensor([block for block, _ in tails], dtype=torch.int64, device=host)
        rests = torch.tensor([rest for _, rest in tails], dtype=torch.int64, device=host)
        kept = torch.arange(BLOCK, device=host) < rests.unsqueeze(1)
        counts = torch.full((count,), float(BLOCK), device=host)
        counts[places] = rests.float()
        self._tails, self._kept, self.counts = (each.to(device) for each in (places, kept, counts))

    @staticmethod
    def of(bucket: Bucket) -> CompressionBlocks:
        """All blocks of a bucket."""
        pieces, count = [], 0
        for segment in bucket.segments:
            shard = segment.parameter.shard
            assert shard.extent[1:] == shard.local[1:], shard
            length = prod(shard.extent)
            if segment.parameter.requires_grad and length:
                pieces.append(ParameterBlocks(segment, 0, segment.start, count * BLOCK, length))
                count += -(-length // BLOCK)
        return CompressionBlocks(pieces, count, bucket.sharding.group.device)

    @staticmethod
    def beside(lengths: Iterable[int], device: torch.device) -> CompressionBlocks:
        """Those of parts of so many elements, one behind the other."""
        pieces, count, start = [], 0, 0
        for length in lengths:
            pieces.append(ParameterBlocks(None, 0, start, count * BLOCK, length))
            count += -(-length // BLOCK)
            start += length
        return CompressionBlocks(pieces, count, device)

    def part(self, span: Span) -> CompressionBlocks:
        """The blocks of a span of them, by themselves."""
        first, last = (block * BLOCK for block in span)
        cut = [piece for each in self.pieces if (piece := each.within(first, last)).length]
        own = [ParameterBlocks(p.segment, p.offset, p.start, p.first - first, p.length) for p in cut]
        device = self.counts.device
        return CompressionBlocks(own, span[1] - span[0], device)

    def equal_spans(self, size: int) -> list[Span]:
        """As many blocks for each of `size` ranks, as far as that can be; the first one has most."""
        borders = [-(-self.count * rank // size) for rank in range(size + 1)]
        return list(pairwise(borders))

    def span_of(self, part: slice) -> Span:
        """The blocks that have any of the bucket's elements `part`."""
        held = [piece for piece in self.pieces if self._overlap(piece, part)[1]]
        if not held:
            return 0, 0
        begin, _ = self._overlap(held[0], part)
        end, length = self._overlap(held[-1], part)
        return begin // BLOCK, -(-(end + length) // BLOCK)

    def pairs(self, blocks: Tensor, flat: Tensor, part: slice) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the flat `blocks`, and of what `flat` has in their place: the bucket's elements `part`."""
        mine, theirs = [], []
        for piece in self.pieces:
            first, length = self._overlap(piece, part)
            if length:
                begin = piece.start + first - piece.first - part.start
                mine.append(blocks[first : first + length])
                theirs.append(flat[begin : begin + length])
        return mine, theirs

    def clear_tails(self, blocks: Tensor) -> Tensor:
        """Flat `blocks`, zero where no parameter has an element."""
        rows = blocks.view(self.count, BLOCK)
        rows[self._tails] = rows[self._tails].where(self._kept, 0)
        return blocks

    def code_spans(self, width: int, scale: int, span: Span) -> Iterator[Span]:
        """Where the bytes of a span of blocks lie in a code of all, `width` of each for its elements and,
        behind these, `scale` of each: stretches, without what fills blocks up.
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
        """As `sharding.state.state_of_ranks`, of flat `blocks`; where sums are `owned`, what their owners
        have lies behind what all ranks have, see `state_of_owner`.
        """
        group, replicas = bucket.sharding.group, bucket.sharding.replicas
        rows = group.size + owned
        number = replicas.rank * rows + group.rank
        for piece in self.pieces:
            assert piece.segment is not None
            values = blocks[piece.first : piece.first + piece.length]
            shard = piece.segment.parameter.shard.stacked(number, replicas.size * rows)
            copy = piece.segment.replication.copy(False, group, replicas)
            yield StateTensor(kind, shard, values, piece.offset, copy, True, "as a sum")

    def state_of_owner(self, kind: str, blocks: Tensor, bucket: Bucket) -> Iterator[StateTensor]:
        """State of flat `blocks` that no other rank of their group has, as if it were that of one rank more:
        on another number of ranks, or where sums are not owned, it goes on with one of them.
        """
        group, replicas = bucket.sharding.group, bucket.sharding.replicas
        rows = group.size + 1
        for piece in self.pieces:
            assert piece.segment is not None
            held = piece.segment.replication
            shard = piece.segment.parameter.shard
            shard = shard.stacked(replicas.rank * rows + group.size, replicas.size * rows)
            values = blocks[piece.first : piece.first + piece.length]
            # The ends of a pipeline cut tied embeddings at other places: one of them writes.
            written, copy = held.stage_copy == 0, (held.holders.rank, held.holders.size)
            yield StateTensor(kind, shard, values, piece.offset, copy, written, "as a sum")

    @staticmethod
    def _overlap(piece: ParameterBlocks, part: slice) -> Span:
        """First element among the blocks, and number, of a piece's elements in a part of the bucket."""
        begin = max(piece.start, part.start)
        length = max(0, min(piece.start + piece.length, part.stop) - begin)
        return piece.first + begin - piece.start, length


def take(code: Tensor, spans: Iterable[Span]) -> Tensor:
    """The bytes of these stretches of a code, one behind the other."""
    return torch.cat([code[first:last] for first, last in spans] or [code[:0]])


def put(code: Tensor, spans: Sequence[Span], taken: Tensor) -> Tensor:
    """The code [..., bytes] with what `take` gave in its places."""
    lengths = [last - first for first, last in spans]
    if lengths:
        places = [code[..., first:last] for first, last in spans]
        torch._foreach_copy_(places, list(taken.split(lengths, -1)))
    return code
