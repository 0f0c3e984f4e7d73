"""Attention of new tokens to keys and values that are stored in pages (PagedAttention, arXiv 2309.06180).

A page stores PAGE tokens of one text, and has the same number in all layers. A text has as many pages as its
tokens need. Keys are stored rotated, so that they are not rotated again for every later token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.host.streams import start_copy
from hpctrain.parallel.kernels.attention_inputs import rotate
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.functions.compiled_attention import (
    attention_arguments,
    heads_of,
    with_contiguous_features,
)
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.function_library import (
    HIGHEST,
    PAGE,
    AttentionArguments,
    Paged,
    padded,
)
from hpctrain.parallel.kernels.functions.layer_functions import LayerFunctions


@dataclass(frozen=True)
class TokenPositions:
    """Texts and positions of the rows of a pass. The rows of a text are consecutive and in order.

    Attributes:
        runs: Text, first position and number of rows of each text in the pass. Text -1 is padding, whose
            rows are all at the first position.
        texts: Text of each row, int64 [n].
        positions: Position of each row, int64 [n].
        tables: Numbers of each text's pages, [texts, pages].
        real: Rows that are not padding, int64 [m].
    """

    runs: Sequence[tuple[int, int, int]]
    texts: Tensor
    positions: Tensor
    tables: Tensor
    real: Tensor

    @staticmethod
    def of(runs: Sequence[tuple[int, int, int]], tables: Tensor) -> TokenPositions:
        """Return the positions of some runs, on the device of the tables."""
        texts = torch.tensor([text for text, _, count in runs for _ in range(count)])
        positions = torch.tensor(
            [first + (n if text >= 0 else 0) for text, first, count in runs for n in range(count)]
        )
        device, real = tables.device, (texts >= 0).nonzero().flatten()  # on the host
        texts, positions, real = (start_copy(each, device) for each in (texts, positions, real))
        return TokenPositions(runs, texts, positions, tables, real)


@dataclass(frozen=True)
class PageLayout:
    """Layout of the keys and values of a layer in memory.

    Compiled functions store rotated keys in fp32, so that rotation is not rounded, and pad features to 16.

    Attributes:
        heads: Heads of keys and values.
        head_size: Number of features of a head, without padding.
        dtype: Format of values, and of keys unless they are rotated by compiled functions.
        rotated: True if keys are stored rotated.
        compiled: True for compiled functions.
    """

    heads: int
    head_size: int
    dtype: torch.dtype
    rotated: bool
    compiled: bool

    @property
    def width(self) -> int:
        """Features of a head with padding."""
        return padded(self.head_size) if self.compiled else self.head_size

    @property
    def key_dtype(self) -> torch.dtype:
        """Format of the keys."""
        return torch.float32 if self.compiled and self.rotated else self.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a page in one layer."""
        return PAGE * self.heads * self.width * (self.key_dtype.itemsize + self.dtype.itemsize)


class LayerPages:
    """Pages of one layer.

    Args:
        layout: Layout of a page.
        pages: Number of pages.
        device: Device of the pages.
        functions: Functions that compute attention.

    Attributes:
        keys: Keys [pages, heads, width, PAGE].
        values: Values [pages, heads, PAGE, width].
    """

    def __init__(
        self, layout: PageLayout, pages: int, device: torch.device, functions: LayerFunctions
    ) -> None:
        self.layout, self.functions = layout, functions
        keys, values = (pages, layout.heads, layout.width, PAGE), (pages, layout.heads, PAGE, layout.width)
        self.keys = torch.zeros(keys, dtype=layout.key_dtype, device=device)
        self.values = torch.zeros(values, dtype=layout.dtype, device=device)

    def copy(self, source: int, target: int) -> None:
        """Copy one page to another."""
        self.keys[target], self.values[target] = self.keys[source], self.values[source]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *tables: Tensor,
        places: TokenPositions,
        rule: AttentionRule,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store new keys and values, and return the attention of each row up to its own position.

        A row is a new token of a text, which is one sequence with pages of its own. Queries and keys are
        rotated here if `tables` are given. The result has the shape of `query`.

        Args:
            query: Queries [n, 1, heads, d] before rotation.
            key: New keys before rotation, which may have fewer heads.
            value: New values.
            tables: Tables of a Rotary for all positions, or none.
            places: Text of each row, and its position in the text.
            rule: Scale, window and soft cap.
            sinks: Score [heads] of a further key of each head, whose value is zero; None without one.
        """
        if isinstance(self.functions, CompiledFunctions):
            scores = None if sinks is None else sinks.float()
            operands = [with_contiguous_features(x) for x in (query, key, value)]
            arguments = attention_arguments(operands[0], operands[1], tables, rule, scores)
            return self._compiled(self.functions, operands, arguments, places)
        if tables:
            of_rows = [table[places.positions] for table in tables]
            query, key = rotate(query, *of_rows), rotate(key, *of_rows)
        self._store(key.squeeze(1), value.squeeze(1), places)
        attend = partial(self._attend_to_pages, places=places, rule=rule, sinks=sinks)
        output = torch.zeros_like(query)
        singles, row = [], 0
        for text, first, count in places.runs:
            if text >= 0 and count == 1:
                singles.append((row, text, first))
            elif text >= 0:
                rows = slice(row, row + count)
                chosen = torch.full((1,), text, device=query.device)
                visible = range(rule.first_key(first), first + count)
                output[rows, 0] = attend(query[rows, 0].unsqueeze(0), chosen, visible)[0]
            row += count
        if singles:
            rows_of, texts, positions = map(list, zip(*singles, strict=True))
            visible = range(rule.first_key(min(positions)), max(positions) + 1)
            at_rows, chosen, at = start_copy(torch.tensor([rows_of, texts, positions]), query.device)
            output[at_rows] = attend(query[at_rows], chosen, visible, at)
        return output

    def _store(self, key: Tensor, value: Tensor, places: TokenPositions) -> None:
        """Store keys and values [n, heads, d] in their pages."""
        real = places.real
        texts, positions = places.texts[real], places.positions[real]
        pages, lanes = places.tables[texts, positions // PAGE], positions % PAGE
        self.keys[pages, :, :, lanes] = key[real]
        self.values[pages, :, lanes] = value[real]

    def _attend_to_pages(
        self,
        query: Tensor,
        texts: Tensor,
        visible: range,
        positions: Tensor | None = None,
        *,
        places: TokenPositions,
        rule: AttentionRule,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention of queries [texts, n, heads, d] to the pages of their texts.

        Args:
            query: The last queries before the end of `visible`, or one query of each text at its position.
            texts: Texts of the queries.
            visible: Positions of all keys that a query sees.
            positions: Position of the query of each text. None for the last queries of one text.
            places: Pages of the texts.
            rule: Scale, window and soft cap.
            sinks: Score [heads] of a further key of each head, whose value is zero; None without one.
        """
        begin = visible.start // PAGE
        pages = places.tables[texts, begin : -(-visible.stop // PAGE)]
        keys = self.keys[pages].permute(0, 2, 1, 4, 3).flatten(2, 3)
        values = self.values[pages].permute(0, 2, 1, 3, 4).flatten(2, 3)
        columns = torch.arange(begin * PAGE, begin * PAGE + keys.shape[2], device=query.device)
        last = columns.new_tensor(range(visible.stop - query.shape[1], visible.stop))
        last = (last if positions is None else positions).unsqueeze(1)
        mask = columns <= last
        if rule.window:
            mask &= columns > last - rule.window
        mask = mask.unsqueeze(0).unsqueeze(0) if positions is None else mask.unsqueeze(1).unsqueeze(1)
        if rule.cap or sinks is not None:
            return _attend_by_products(query, keys, values, mask, rule, sinks)
        output = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            scale=rule.scale,
            enable_gqa=query.shape[2] != keys.shape[1],
        )
        return output.transpose(1, 2)

    def _compiled(
        self,
        functions: CompiledFunctions,
        operands: Sequence[Tensor],
        arguments: AttentionArguments,
        places: TokenPositions,
    ) -> Tensor:
        output = operands[0].new_empty(operands[0].shape)
        across = places.tables.shape[1]
        paged = Paged(
            arguments,
            across,
            self.keys.element_size(),
            *(x.data_ptr() for x in (self.keys, self.values, places.texts, places.positions, places.tables)),
        )
        memory = torch.empty(HIGHEST * (across * PAGE + 2 * self.layout.width))
        functions.call("attend_paged", paged, *map(heads_of, (*operands, output)), memory)
        return output


def _attend_by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rule: AttentionRule, sinks: Tensor | None
) -> Tensor:
    """Return the attention of queries [texts, n, heads, d] to the keys [texts, groups, m, d] of a mask."""
    shared = query.shape[2] // keys.shape[1]
    keys, values = (x.repeat_interleave(shared, dim=1).float() for x in (keys, values))
    scores = (query.transpose(1, 2).float() @ keys.mT) * rule.scale
    if rule.cap:
        scores = rule.cap * (scores / rule.cap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        of_heads = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat((scores, of_heads), -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return (probabilities @ values).transpose(1, 2).to(query.dtype)
