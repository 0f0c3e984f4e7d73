"""Sums of codes: ranks send owners the codes of what these sum, and owners send codes of the sums back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import SequentialWork, Work
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.communication import RoundedTable
from hpctrain.host.device import on_host
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.blocks import CompressionBlocks, Span, put, take
from hpctrain.sharding.compression.codecs import Codec
from hpctrain.sharding.state import StateTensor

AT_ONCE, AT_ONCE_ON_GPU = 1 << 10, 1 << 16
"""Blocks that are coded at a time."""

_KIND = "reducer/residual"

Encode = Callable[[Tensor, Tensor], Tensor]
"""As Codec.encode."""


class CodedSum:
    """A sum of codes, in two operations of a group of several ranks.

    What each rank codes is its values and, where there is a `residual`, what was lost of them before, which
    is kept. Of the `blocks`, `owned` are each rank's. One all-to-all takes the codes to these owners; they
    add in fp32, in the order of the ranks. If no sum `returns` to others, each has its own by that: its part
    `own_slice` of the flat values. Else owners code the sums, with an `own_residual` if there is one, and all
    ranks gather these.
    """

    def __init__(
        self,
        blocks: CompressionBlocks,
        group: Group,
        codec: Codec,
        owned: Sequence[Span],
        returns: bool = True,
        own_slice: slice = slice(0),
    ) -> None:
        self.blocks, self.group, self.codec = blocks, group, codec
        self.returns, self._own_slice = returns, own_slice
        self.own = blocks.part(owned[group.rank])
        of_owners = [list(blocks.code_spans(codec.width, codec.scale, span)) for span in owned]
        self._spans = [span for spans in of_owners for span in spans]
        self._own_spans = list(self.own.code_spans(codec.width, codec.scale, (0, self.own.count)))
        self._sizes = [sum(last - first for first, last in spans) for spans in of_owners]
        self.residual: Tensor | None = None
        self.own_residual: Tensor | None = None
        self.summed: Tensor | None = None
        self._at_once = AT_ONCE if on_host(group.computes_on) else AT_ONCE_ON_GPU

    @property
    def scratch_bytes(self) -> int:
        """See Summation: codes that go, come and lie in their places, what is coded without a residual or
        whole sums beside two of them, this rank's own sums, and a piece that is coded.
        """
        code, whole = self._code_bytes(self.blocks.count), self.returns or self.residual is None
        values = 4 * self.blocks.elements if whole else 0
        piece = min(self.blocks.count, self._at_once) * BLOCK
        return max(2 * code + values, 3 * code) + 4 * self.own.elements + 2 * self.codec.working_bytes(piece)

    def operations(self, gradients: Tensor, sums: Tensor) -> Iterator[Work[Any]]:
        """The operations, and what is computed before, between and after them."""
        if not self.blocks.count:
            return
        sizes, rank = self._sizes, self.group.rank
        values = self._values(gradients)
        code = self._coded(self.blocks, values, self.codec.encode, self.residual is not None)
        del values
        sent = take(code, self._spans)
        del code
        received = sent.new_empty(self.group.size * sizes[rank])
        yield self.group.start_all_to_all(sent, received, sizes, [sizes[rank]] * self.group.size)
        codes = sent.new_zeros((self.group.size, self._code_bytes(self.own.count)))
        put(codes, self._own_spans, received.view(self.group.size, -1))
        del sent, received
        if not self.returns:
            total = self.own.clear_tails(self._added(self.own, codes))
            mine, theirs = self.own.pairs(total, sums, self._own_slice)
            if mine:
                torch._foreach_copy_(theirs, mine)
            return
        sent = take(self._code_of_total(codes), self._own_spans)
        del codes
        received = sent.new_empty(sum(sizes))
        yield self.group.start_all_gather(sent, received, sizes)
        self.summed = put(sent.new_zeros(self._code_bytes(self.blocks.count)), self._spans, received)
        del sent, received
        self.decode_into(gradients)

    def decode_into(self, flat: Tensor) -> None:
        """Fill the flat values with the whole sums of this step."""
        assert self.summed is not None
        values = self.blocks.clear_tails(self._added(self.blocks, [self.summed]))
        mine, theirs = self.blocks.pairs(values, flat, slice(0, flat.numel()))
        torch._foreach_copy_(theirs, mine)

    def add(self, codes: Sequence[Tensor]) -> Tensor:
        """The sum of what codes of the same blocks, of all ranks in their order or one code, stand for."""
        total = self.codec.decode(codes[0])
        for code in codes[1:]:
            total.add_(self.codec.decode(code))
        return total

    def encode_sums(self, sums: Tensor, counts: Tensor) -> Tensor:
        """The code of sums."""
        return self.codec.encode(sums, counts)

    def _values(self, gradients: Tensor) -> Tensor:
        """What this rank codes: in the residual's memory, where there is one."""
        everything = slice(0, gradients.numel())
        if self.residual is None:
            values = torch.zeros(self.blocks.elements, device=gradients.device)
            torch._foreach_copy_(*self.blocks.pairs(values, gradients, everything))
            return values
        torch._foreach_add_(*self.blocks.pairs(self.residual, gradients, everything))
        return self.residual

    def _code_of_total(self, codes: Tensor) -> Tensor:
        """The code of the sums of this rank's blocks, of their codes by all ranks [ranks, bytes]."""
        total = self.own.clear_tails(self._added(self.own, codes))
        values = total if self.own_residual is None else self.own_residual.add_(total)
        return self._coded(self.own, values, self.encode_sums, self.own_residual is not None)

    def _coded(self, blocks: CompressionBlocks, values: Tensor, encode: Encode, feedback: bool) -> Tensor:
        """The code of `values`, which with `feedback` are what it loses afterwards."""
        code = values.new_empty(self._code_bytes(blocks.count), dtype=torch.uint8)
        for piece, spans in self._pieces(blocks):
            elements = values[piece.start * BLOCK : piece.stop * BLOCK]
            coded = encode(elements, blocks.counts[piece])
            put(code, spans, coded)
            if feedback:
                elements.sub_(self.codec.decode(coded))
        if feedback:
            blocks.clear_tails(values)
        return code

    def _added(self, blocks: CompressionBlocks, codes: Tensor | Sequence[Tensor]) -> Tensor:
        """The sum of what codes of these blocks stand for."""
        total = torch.empty(blocks.elements, device=codes[0].device)
        for piece, spans in self._pieces(blocks):
            total[piece.start * BLOCK : piece.stop * BLOCK] = self.add([take(code, spans) for code in codes])
        return total

    def _pieces(self, blocks: CompressionBlocks) -> Iterator[tuple[slice, list[Span]]]:
        """Some blocks at a time, and where their bytes lie in a code of all: what a cache holds is quick."""
        width, scale, count = self.codec.width, self.codec.scale, blocks.count
        for first in range(0, count, self._at_once):
            last = min(first + self._at_once, count)
            scales = [(count * width + first * scale, count * width + last * scale)] if scale else []
            yield slice(first, last), [(first * width, last * width), *scales]

    def _code_bytes(self, count: int) -> int:
        return count * (self.codec.width + self.codec.scale)


class CompressedReduction(CodedSum):
    """The sum of a bucket's gradients, in codes; with `feedback` residuals are kept.

    Blocks have owners: as many for each rank or, where ZeRO cuts and this is not `whole`, the rank whose
    slice has elements of it, which are two where a slice ends. Slices are done when their owners have summed;
    sums that are whole, with ZeRO too, return to all.
    """

    def __init__(self, bucket: Bucket, codec: Codec, feedback: bool, whole: bool = False) -> None:
        self.bucket, group, device = bucket, bucket.sharding.group, bucket.sharding.group.device
        returns, blocks = whole or bucket.sharding.zero == 0, CompressionBlocks.of(bucket)
        slices = [slice(first, last) for first, last in pairwise(bucket.layout.borders)]
        owned = blocks.equal_spans(group.size) if returns else list(map(blocks.span_of, slices))
        super().__init__(blocks, group, codec, owned, returns, bucket.slice)
        if feedback:
            self.residual = torch.zeros(blocks.elements, device=device)
        if feedback and returns:
            self.own_residual = torch.zeros(self.own.elements, device=device)

    @staticmethod
    def of(codec: Codec) -> Callable[[Deck, Bucket], CompressedReduction]:
        """What makes one of a deck and a bucket."""

        def make(deck: Deck, bucket: Bucket) -> CompressedReduction:
            form = deck.communication.compression
            assert isinstance(form, RoundedTable)
            return CompressedReduction(bucket, codec, form.error_feedback)

        return make

    def begin(self, updates: int) -> None:
        """Begin a step."""

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum the gradients of the bucket over the ranks of its group."""
        return SequentialWork(self.operations(gradients, sums), sums)

    def after_step(self, updated: bool, factor: float) -> None:
        """End a step."""
        self.summed = None
        for residual in (self.residual, self.own_residual):
            if residual is not None and not updated:
                residual.zero_()
            elif residual is not None and factor != 1:
                residual.mul_(factor)

    def state(self) -> Iterator[StateTensor]:
        """Yield all tensors of the state. They are the same tensors in every step."""
        if self.residual is not None:
            yield from self.blocks.state_of_ranks(_KIND, self.residual, self.bucket, self.returns)
        if self.own_residual is not None:
            yield from self.own.state_of_owner(_KIND, self.own_residual, self.bucket)
