"""Sums of codes: ranks send codes to the owners of blocks, and owners return codes of the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.comm.work import SequentialWork, Work
from hpctrain.host.device import on_host
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.blocks import CompressionBlocks, Span, read_spans, write_spans
from hpctrain.sharding.compression.codecs import Codec
from hpctrain.sharding.reducer import GradientReduction, rescale_residuals
from hpctrain.sharding.state import StateTensor

BLOCKS_AT_ONCE, BLOCKS_AT_ONCE_ON_GPU = 1 << 10, 1 << 16
"""Number of blocks that are encoded at a time, on CPUs and on GPUs."""

_KIND = "reducer/residual"

Encode = Callable[[Tensor, Tensor], Tensor]
"""Function like `Codec.encode`."""


class CodedSum:
    """Sum of encoded values, in two operations of a group of several ranks.

    1. Each rank encodes its values plus its residual, which becomes the part that the code has lost. One
    all-to-all sends the codes to the owners of the blocks.
    2. The owners add in fp32, in the order of the ranks. They encode the sums, with a residual of their own,
    and all ranks gather these codes. If `returns` is False this step is omitted, and each rank keeps the sums
    of its blocks.

    Args:
        blocks: Blocks of the values.
        group: Ranks that add.
        codec: The codec.
        owned: Range of blocks that each rank owns.
        returns: True if all ranks receive all sums.
        sums_slice: Otherwise the part of the values that this rank's sums belong to.

    Attributes:
        residual: Elements that are kept for the next sum, or None.
        owner_residual: Such elements of the sums that this rank owns, or None.
        sum_code: Code of the last sums, if any.
        at_once: Number of blocks that are encoded at a time.
    """

    def __init__(
        self,
        blocks: CompressionBlocks,
        group: Group,
        codec: Codec,
        owned: Sequence[Span],
        returns: bool = True,
        sums_slice: slice = slice(0),
    ) -> None:
        self.blocks, self.group, self.codec = blocks, group, codec
        self.returns, self._sums_slice = returns, sums_slice
        owned_blocks = self.owned_blocks = blocks.part(owned[group.rank])
        of_owners = [list(blocks.code_spans(codec.width, codec.scale, span)) for span in owned]
        self._spans = [span for spans in of_owners for span in spans]
        self._owner_spans = list(owned_blocks.code_spans(codec.width, codec.scale, (0, owned_blocks.count)))
        self._sizes = [sum(last - first for first, last in spans) for spans in of_owners]
        self.residual: Tensor | None = None
        self.owner_residual: Tensor | None = None
        self.sum_code: Tensor | None = None
        self.at_once = BLOCKS_AT_ONCE if on_host(group.computes_on) else BLOCKS_AT_ONCE_ON_GPU

    def operations(self, gradients: Tensor, sums: Tensor) -> Iterator[Work[Any]]:
        """Yield the operations in order, for SequentialWork. Encode and decode between them. Collective.

        Args:
            gradients: Values of this rank [n], such as the gradients of a bucket. If `returns`, they become
                the sums.
            sums: Otherwise memory for the sums of the values `sums_slice`.
        """
        if not self.blocks.count:
            return
        sizes, rank = self._sizes, self.group.rank
        values = self._values(gradients)
        code = self._encode_pieces(self.blocks, values, self.codec.encode, self.residual is not None)
        del values
        sent = read_spans(code, self._spans)
        del code
        received = sent.new_empty(self.group.size * sizes[rank])
        yield self.group.start_all_to_all(sent, received, sizes, [sizes[rank]] * self.group.size)
        codes = sent.new_zeros((self.group.size, self.code_bytes(self.owned_blocks.count)))
        write_spans(codes, self._owner_spans, received.view(self.group.size, -1))
        del sent, received
        if not self.returns:
            total = self.owned_blocks.clear_tails(self._sum_codes(self.owned_blocks, codes))
            source, target = self.owned_blocks.matching_views(total, sums, self._sums_slice)
            if source:
                torch._foreach_copy_(target, source)
            return
        sent = read_spans(self._code_of_total(codes), self._owner_spans)
        del codes
        received = sent.new_empty(sum(sizes))
        yield self.group.start_all_gather(sent, received, sizes)
        self.sum_code = write_spans(sent.new_zeros(self.code_bytes(self.blocks.count)), self._spans, received)
        del sent, received
        self.decode_into(gradients)

    def decode_into(self, flat: Tensor) -> None:
        """Decode `sum_code` into the places of the parameters. Only after `operations`, and if `returns`.

        Args:
            flat: Values like those of `operations` [n], in any floating-point dtype. Padding stays as it is.
        """
        assert self.sum_code is not None
        values = self.blocks.clear_tails(self._sum_codes(self.blocks, [self.sum_code]))
        source, target = self.blocks.matching_views(values, flat, slice(0, flat.numel()))
        torch._foreach_copy_(target, source)

    def add(self, codes: Sequence[Tensor]) -> Tensor:
        """Return the sum of decoded values, fp32 [blocks * BLOCK]. MajorityVote overrides it.

        Args:
            codes: Code of the same blocks by each rank, or the single code of their sums.
        """
        total = self.codec.decode(codes[0])
        for code in codes[1:]:
            total.add_(self.codec.decode(code))
        return total

    def encode_sums(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the code of the sums of owned blocks, as `Codec.encode`. MajorityVote overrides it."""
        return self.codec.encode(sums, counts)

    def _values(self, gradients: Tensor) -> Tensor:
        """Return the values to encode, in the memory of the residual if there is one."""
        residual, everything = self.residual, slice(0, gradients.numel())
        values = torch.zeros(self.blocks.elements, device=gradients.device) if residual is None else residual
        target, added = self.blocks.matching_views(values, gradients, everything)
        (torch._foreach_copy_ if residual is None else torch._foreach_add_)(target, added)
        return values

    def _code_of_total(self, codes: Tensor) -> Tensor:
        """Return the code of the sums of this rank's blocks.

        Args:
            codes: Codes of these blocks by all ranks, uint8 [ranks, bytes].
        """
        blocks, residual = self.owned_blocks, self.owner_residual
        total = blocks.clear_tails(self._sum_codes(blocks, codes))
        values = total if residual is None else residual.add_(total)
        return self._encode_pieces(blocks, values, self.encode_sums, residual is not None)

    def _encode_pieces(
        self, blocks: CompressionBlocks, values: Tensor, encode: Encode, feedback: bool
    ) -> Tensor:
        """Return the code of `values`. With `feedback`, `values` become what the code has lost."""
        code = values.new_empty(self.code_bytes(blocks.count), dtype=torch.uint8)
        for piece, spans in self._pieces(blocks):
            elements = values[piece.start * BLOCK : piece.stop * BLOCK]
            coded = encode(elements, blocks.counts[piece])
            write_spans(code, spans, coded)
            if feedback:
                elements.sub_(self.codec.decode(coded))
        if feedback:
            blocks.clear_tails(values)
        return code

    def _sum_codes(self, blocks: CompressionBlocks, codes: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the sum of decoded values, fp32 [blocks.elements], computed some blocks at a time.

        Args:
            blocks: All blocks, or those of this rank.
            codes: Code of these blocks by each rank, or the single code of their sums.
        """
        total = torch.empty(blocks.elements, device=codes[0].device)
        for piece, spans in self._pieces(blocks):
            parts = [read_spans(code, spans) for code in codes]
            total[piece.start * BLOCK : piece.stop * BLOCK] = self.add(parts)
        return total

    def _pieces(self, blocks: CompressionBlocks) -> Iterator[tuple[slice, list[Span]]]:
        """Yield up to `at_once` of the blocks, and the ranges of their bytes in the code of all of them."""
        width, scale, count = self.codec.width, self.codec.scale, blocks.count
        for first in range(0, count, self.at_once):
            last = min(first + self.at_once, count)
            scales = [(count * width + first * scale, count * width + last * scale)] if scale else []
            yield slice(first, last), [(first * width, last * width), *scales]

    def code_bytes(self, count: int) -> int:
        """Return the number of bytes of the code of `count` blocks."""
        return count * (self.codec.width + self.codec.scale)


class CompressedReduction(CodedSum, GradientReduction):
    """Sum of a bucket's gradients by codes, with residuals if `feedback`.

    Without ZeRO, and if `replicate`, each rank owns equally many blocks and all ranks receive all sums.
    Otherwise the owner of a block is the rank whose slice has elements of it; there are two if a slice ends
    in it. Then the sums need not be sent back.

    Args:
        bucket: The bucket.
        codec: The codec.
        feedback: True if residuals are kept.
        replicate: True if all ranks receive all sums, also with ZeRO.
    """

    def __init__(self, bucket: Bucket, codec: Codec, feedback: bool, replicate: bool = False) -> None:
        self.bucket, group, device = bucket, bucket.sharding.group, bucket.sharding.group.device
        returns, blocks = replicate or bucket.sharding.zero == 0, CompressionBlocks.of(bucket)
        slices = [slice(first, last) for first, last in pairwise(bucket.layout.borders)]
        owned = blocks.equal_spans(group.size) if returns else list(map(blocks.span_of, slices))
        super().__init__(blocks, group, codec, owned, returns, bucket.slice)
        if feedback:
            self.residual = torch.zeros(blocks.elements, device=device)
        if feedback and returns:
            self.owner_residual = torch.zeros(self.owned_blocks.elements, device=device)

    @override
    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        return SequentialWork(self.operations(gradients, sums), sums)

    @override
    def end_step(self, updated: bool, scale_ratio: float) -> None:
        self.sum_code = None
        rescale_residuals((self.residual, self.owner_residual), updated, scale_ratio)

    @override
    def state(self) -> Iterator[StateTensor]:
        if self.residual is not None:
            yield from self.blocks.state_of_ranks(_KIND, self.residual, self.bucket, self.returns)
        if self.owner_residual is not None:
            yield from self.owned_blocks.state_of_owner(_KIND, self.owner_residual, self.bucket)
