"""Attention whose scores have a limited reach, a soft cap or sinks, by tiles of queries and keys.

A query at position i sees the keys at positions j with i - window < j <= i. These lie in a band along the
diagonal, which is cut into squares and rectangles that kernels without masks compute:

    window 3     tiles
    a            a  causal squares: a query sees the keys up to its own place
    a a          b  reversed squares: a query sees the keys from its own place on, which is
    a a a           the causal square of both in reversed order
    . b b a      (a third kind has no mask: all its queries see all its keys)
    . . b a a
    . . . a a a

Results of tiles with the same queries merge by their log-sum-exps. The backward pass of a tile needs the
output and log-sum-exp over all keys. Masked parts are not computed, except within the squares on CPUs.
Tensors are as in attention_block.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hpctrain.parallel.kernels.attention_block import attend, attend_backward, merge

Mask = Literal["none", "causal", "reversed"]
"""Keys that query number i of a tile sees: all, those up to number i, or those from number i on."""

CAPPED_TILE = 512
"""Largest tile with a soft cap; its score matrix is materialized."""

CAPPED_MATRICES = 6
"""Matrices in fp32, as large as the scores of a tile, that its backward pass has at once with a soft cap."""

_CPU_TILE_ROWS = 128
"""Largest number of queries of a tile with a window in fp32 on CPUs, whose kernels compute masked parts, too.

Products in 16 bits are faster in larger tiles.
"""


class AttentionBlock(NamedTuple):
    """Queries and keys of tensors [s, b, heads, d] that a kernel computes together.

    A tile is a block with all rows of the batch.

    Attributes:
        queries: Rows of the queries.
        keys: Rows of the keys.
        mask: Mask between these. With one there are as many queries as keys.
        batch: Rows of the batch.
    """

    queries: slice
    keys: slice
    mask: Mask
    batch: slice = slice(None)

    def shift(self, batch: slice, first_query: int, first_key: int) -> AttentionBlock:
        """Return the block shifted by `first_query` and `first_key`, for these rows of the batch."""
        queries = slice(first_query + self.queries.start, first_query + self.queries.stop)
        keys = slice(first_key + self.keys.start, first_key + self.keys.stop)
        return AttentionBlock(queries, keys, self.mask, batch)


def band_tiles(
    queries: int, keys: int, distance: int, window: int, rows: int = 0, columns: int = 0
) -> Iterator[AttentionBlock]:
    """Yield tiles that cover all pairs of a query and a key that it sees, each pair once.

    Args:
        queries: Number of consecutive queries.
        keys: Number of consecutive keys.
        distance: Position of the first query minus that of the first key.
        window: Number of keys that a query sees, with the one at its own position; 0 for all earlier ones.
        rows: Most queries of a tile; 0 for no limit.
        columns: Most keys of a tile without a mask; 0 for no limit.
    """
    reach = window or distance + queries
    step = min(reach, queries, rows or queries)
    for begin in range(0, queries, step):
        end = min(begin + step, queries)
        diagonal = distance + begin  # key of the same position as the first query
        count = end - begin
        yield from _square(begin, count, diagonal, keys, "causal")
        first, last = max(diagonal + count - reach, 0), min(diagonal, keys)
        for start in range(first, last, columns or max(last - first, 1)):
            yield AttentionBlock(
                slice(begin, end), slice(start, min(start + (columns or last), last)), "none"
            )
        yield from _square(begin, count - 1, diagonal - reach + 1, keys, "reversed")


def _square(begin: int, count: int, place: int, keys: int, mask: Mask) -> Iterator[AttentionBlock]:
    """Yield tiles for the existing keys of the square of `count` queries from `begin`, keys from `place`."""
    first, last = max(place, 0) - place, min(place + count, keys) - place
    if first >= last:
        return
    visible = slice(place + first, place + last)
    yield AttentionBlock(slice(begin + first, begin + last), visible, mask)
    # Of queries outside the existing part of the diagonal, those on the side of the mask see all keys.
    rest = slice(begin + last, begin + count) if mask == "causal" else slice(begin, begin + first)
    if rest.start < rest.stop:
        yield AttentionBlock(rest, visible, "none")


@dataclass(frozen=True)
class AttentionRule:
    """Rule by which products of queries and keys become weights of attention.

    Attributes:
        scale: Factor of the products, 1 / sqrt(d) in most models.
        window: Number of keys that a query sees, with the one at its own position; 0 for all earlier ones.
        cap: Bound c of the scores x, which become c tanh(x / c); 0 for none.
    """

    scale: float
    window: int = 0
    cap: float = 0.0

    @cached_property
    def needs_tiles(self) -> bool:
        """True if scores have a window or a cap, so that attention is computed by tiles."""
        return bool(self.window or self.cap)

    def first_key(self, position: int) -> int:
        """Return the first key that a query at a position sees."""
        return max(0, position - self.window + 1) if self.window else 0

    def tiles(self, query: Tensor, queries: int, keys: int, distance: int = 0) -> Iterator[AttentionBlock]:
        """Yield the tiles of `band_tiles` for this rule, in sizes that are fast for a device and format.

        Args:
            query: Tensor of queries, whose device and format count.
            queries: Number of consecutive queries.
            keys: Number of consecutive keys.
            distance: Position of the first query minus that of the first key.
        """
        columns = CAPPED_TILE if self.cap else 0
        by_rows = self.window and not self.cap and query.is_cpu and query.element_size() > 2
        rows = _CPU_TILE_ROWS if by_rows else columns
        return band_tiles(queries, keys, distance, self.window, rows, columns)

    def attend_block(
        self, block: AttentionBlock, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the output [n, rows, heads, d] and the log-sum-exp [rows, heads, n] of a block.

        This applies the scale, the cap and the mask. The window has no effect here: it decides which tiles
        `tiles` yields.

        Args:
            block: Block of n queries, and of rows of the batch.
            query: All queries, [s, b, heads, d].
            key: All keys.
            value: All values.
        """
        queries, keys, mask, batch = block
        query, key, value = query[queries, batch], key[keys, batch], value[keys, batch]
        if self.cap:
            return self._capped(query, key, value, mask)
        if mask != "reversed":
            return attend(query, key, value, mask == "causal", self.scale)
        output, log_sum = attend(query.flip(0), key.flip(0), value.flip(0), True, self.scale)
        return output.flip(0), log_sum.flip(-1)

    def attend_block_backward(
        self,
        block: AttentionBlock,
        output_gradient: Tensor,
        operands: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        log_sum: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the query, key and value of a block, as `attend_backward` does.

        Args:
            block: The block.
            output_gradient: Gradient of the output, [s, b, heads, d].
            operands: All queries, keys and values.
            output: Output of all queries over all keys, not only those of the block.
            log_sum: Log-sum-exp of all queries over all keys, [b, heads, s].
        """
        queries, keys, mask, batch = block
        output_gradient, output = output_gradient[queries, batch], output[queries, batch]
        query, key, value = (x[rows, batch] for x, rows in zip(operands, (queries, keys, keys), strict=True))
        log_sum = log_sum[batch, :, queries]
        if self.cap:
            return self._capped_backward(output_gradient, (query, key, value), output, log_sum, mask)
        if mask != "reversed":
            parts = (query, key, value)
            return attend_backward(output_gradient, parts, output, log_sum, mask == "causal", self.scale)
        parts = (query.flip(0), key.flip(0), value.flip(0))
        dq, dk, dv = attend_backward(
            output_gradient.flip(0), parts, output.flip(0), log_sum.flip(-1), True, self.scale
        )
        return dq.flip(0), dk.flip(0), dv.flip(0)

    def _capped(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        q, k, v = _by_group(query, key), _by_group(key, key), _by_group(value, key)
        scores = self._capped_scores(q, k, query, mask)
        log_sum = scores.logsumexp(-1)
        output = (scores - log_sum.unsqueeze(-1)).exp() @ v
        return _by_head(output, query).to(query.dtype), _of_heads(log_sum, query)

    def _capped_backward(
        self,
        output_gradient: Tensor,
        operands: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        log_sum: Tensor,
        mask: Mask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = operands
        g, q, k, v, o = (_by_group(x, key) for x in (output_gradient, query, key, value, output))
        scores = self._capped_scores(q, k, query, mask)
        probabilities = (scores - log_sum.reshape(scores.shape[:-1]).unsqueeze(-1)).exp()
        score_gradient = g @ v.mT - (g * o).sum(-1, keepdim=True)
        # -inf where a key is masked; these entries are set to 0 below
        tanh_gradient = 1 - (scores / self.cap).square()
        score_gradient = probabilities * score_gradient * tanh_gradient
        score_gradient = score_gradient.masked_fill(scores == -torch.inf, 0) * self.scale
        dq = _by_head(score_gradient @ k, query).to(query.dtype)
        dk = _by_head(score_gradient.mT @ q, key).to(query.dtype)
        dv = _by_head(probabilities.mT @ g, value).to(query.dtype)
        return dq, dk, dv

    def _capped_scores(self, q: Tensor, k: Tensor, query: Tensor, mask: Mask) -> Tensor:
        """Return the scores [b, groups, shared * n, m] with the cap, and -inf where the mask hides a key."""
        scores = (q @ k.mT).mul_(self.scale / self.cap).tanh_().mul_(self.cap)
        if mask == "none":
            return scores
        rows, columns = query.shape[0], k.shape[2]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
        hidden = hidden.triu(1) if mask == "causal" else hidden.tril(-1)
        by_row: Tensor = scores.unflatten(2, (-1, rows)).masked_fill_(hidden, -torch.inf)
        return by_row.flatten(2, 3)


def _by_group(x: Tensor, key: Tensor) -> Tensor:
    """Return x [n, b, heads, d] as [b, groups, shared * n, d] in fp32, with the groups of the keys."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    groups: Tensor = x.permute(1, 2, 0, 3).unflatten(1, (key.shape[2], -1))
    return groups.flatten(2, 3)


def _by_head(x: Tensor, like: Tensor) -> Tensor:
    """Return x [b, groups, shared * n, d] as [n, b, heads, d], the inverse of `_by_group`."""
    heads: Tensor = x.unflatten(2, (-1, like.shape[0]))
    return heads.flatten(1, 2).permute(2, 0, 1, 3)


def _of_heads(log_sum: Tensor, query: Tensor) -> Tensor:
    """Return the log-sum-exp [b, groups, shared * n] as [b, heads, n]."""
    heads: Tensor = log_sum.unflatten(2, (-1, query.shape[0]))
    return heads.flatten(1, 2)


class PartialAttention:
    """Output and log-sum-exp of queries over the blocks of keys that were added so far.

    Args:
        query: Queries [s, b, heads, d].
        features: Features of the output.
        initialized: True to start with the values over no keys, False to leave both uninitialized.
        rounded: True for an output in the format of the queries, which stores results but adds none.

    Attributes:
        output: Output over the keys so far, [s, b, heads, features] in fp32 unless it is `rounded`.
        log_sum: Log-sum-exp over them, [b, heads, s].
    """

    def __init__(self, query: Tensor, features: int, initialized: bool, rounded: bool = False) -> None:
        rows, batch, heads, _ = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        self.output = query.new_empty(rows, batch, heads, features, dtype=query.dtype if rounded else dtype)
        self.log_sum = query.new_empty(batch, heads, rows, dtype=dtype)
        if initialized:
            self.output.zero_()
            self.log_sum.fill_(-torch.inf)

    def store(self, block: AttentionBlock, output: Tensor, log_sum: Tensor) -> None:
        """Store the result of the queries of a block, to which nothing was added yet."""
        queries, batch = block.queries, block.batch
        self.output[queries, batch], self.log_sum[batch, :, queries] = output, log_sum

    def add(self, block: AttentionBlock, output: Tensor, log_sum: Tensor) -> None:
        """Add the result of the queries of a block over its keys."""
        queries, batch = block.queries, block.batch
        merge(self.output[queries, batch], self.log_sum[batch, :, queries], output, log_sum)

    def add_sinks(self, sinks: Tensor) -> None:
        """Add a key to each head with the value zero, whose score is a sink [heads]."""
        log_sum = torch.logaddexp(self.log_sum, sinks.to(self.log_sum.dtype)[:, None])
        self.output *= (self.log_sum - log_sum).exp().permute(2, 0, 1).unsqueeze(-1)
        self.log_sum = log_sum


def sinks_gradient(output_gradient: Tensor, output: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks [heads].

    Args:
        output_gradient: Gradient of the output, [s, b, heads, d].
        output: Output, [s, b, heads, d].
        log_sum: Natural log-sum-exps over all keys and the sink, [b, heads, s].
        sinks: Score of each head.
    """
    dtype = log_sum.dtype
    probabilities = (sinks.to(dtype)[:, None] - log_sum).exp()
    products = (output_gradient.to(dtype) * output.to(dtype)).sum(-1).permute(1, 2, 0)
    return -(probabilities * products).sum((0, 2)).to(sinks.dtype)
