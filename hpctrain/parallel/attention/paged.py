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
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.functions.compiled_attention import (
    attention_arguments,
    heads_of,
    with_contiguous_features,
)
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.function_library import (
    MAX_QUERIES,
    PAGE,
    Paged,
    padded,
)
from hpctrain.parallel.kernels.functions.layer_functions import LayerFunctions


@dataclass(frozen=True)
class TokenPositions:
    """Texts and positions of the new tokens of a forward pass, with one row each.

    The rows of a text are consecutive and in order.

    Attributes:
        runs: Number, first new position and number of new tokens of each text. Text -1 is padding, whose
            tokens are all at the first position.
        texts: Number of each row's text, int64 [n].
        positions: Position of each row in its text, int64 [n].
        tables: Numbers of each text's pages, [texts, pages].
        rotations: Row of each token in the rotary tables, int64 [n].
        real: Rows that are not padding, int64 [m].
    """

    runs: Sequence[tuple[int, int, int]]
    texts: Tensor
    positions: Tensor
    tables: Tensor
    rotations: Tensor
    real: Tensor

    @staticmethod
    def of(
        runs: Sequence[tuple[int, int, int]], tables: Tensor, rotated_by_row: bool = False
    ) -> TokenPositions:
        """Return the positions of new tokens, on the device of the tables.

        Args:
            runs: Number, first new position and number of new tokens of each text.
            tables: Numbers of each text's pages, [texts, pages].
            rotated_by_row: True if the rotary tables have a row for each token of the pass. False if they
                have one for each position.
        """
        texts = torch.tensor([text for text, _, count in runs for _ in range(count)])
        positions = torch.tensor(
            [first + (n if text >= 0 else 0) for text, first, count in runs for n in range(count)]
        )
        device, real = tables.device, (texts >= 0).nonzero().flatten()  # computed on the host
        texts, positions, real = (start_copy(each, device) for each in (texts, positions, real))
        rotations = torch.arange(len(positions), device=device) if rotated_by_row else positions
        return TokenPositions(runs, texts, positions, tables, rotations, real)


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

    def attend(self, inputs: AttentionInputs, rule: AttentionRule, token_positions: TokenPositions) -> Tensor:
        """Store the keys and values of new tokens, and return the attention [n, 1, heads, d] of these.

        Each token sees the tokens of its text up to its own position.

        Args:
            inputs: Queries, keys and values [n, 1, heads, d] of n tokens before rotation, and sinks. The
                tables are those of a Rotary. `TokenPositions.rotations` are their rows for the tokens.
            rule: Scale, window and soft cap.
            token_positions: Text of each token, and its position in the text.
        """
        if isinstance(self.functions, CompiledFunctions):
            return self._attend_compiled(self.functions, inputs, rule, token_positions)
        if inputs.tables:
            tables = tuple(table[token_positions.rotations] for table in inputs.tables)
            inputs = inputs._replace(tables=tables).rotated()
        query, key, value, sinks, _, _ = inputs
        self._store(key.squeeze(1), value.squeeze(1), token_positions)
        attend = partial(self._attend_to_pages, page_numbers=token_positions.tables, rule=rule, sinks=sinks)
        output = torch.zeros_like(query)
        singles, row = [], 0
        for text, first, count in token_positions.runs:
            if text >= 0 and count == 1:
                singles.append((row, first))
            elif text >= 0:
                rows, visible = slice(row, row + count), range(rule.first_key(first), first + count)
                positions = token_positions.positions[rows].unsqueeze(0)
                one_text = query[rows, 0].unsqueeze(0)
                output[rows, 0] = attend(one_text, token_positions.texts[row : row + 1], positions, visible)[
                    0
                ]
            row += count
        if singles:
            single_rows, first_positions = zip(*singles, strict=True)
            visible = range(rule.first_key(min(first_positions)), max(first_positions) + 1)
            chosen = start_copy(torch.tensor(single_rows), query.device)
            positions = token_positions.positions[chosen].unsqueeze(1)
            output[chosen] = attend(query[chosen], token_positions.texts[chosen], positions, visible)
        return output

    def _store(self, key: Tensor, value: Tensor, token_positions: TokenPositions) -> None:
        """Store keys and values [n, heads, d] in their pages."""
        real = token_positions.real
        texts, positions = token_positions.texts[real], token_positions.positions[real]
        pages, lanes = token_positions.tables[texts, positions // PAGE], positions % PAGE
        self.keys[pages, :, :, lanes] = key[real]
        self.values[pages, :, lanes] = value[real]

    def _attend_to_pages(
        self,
        query: Tensor,
        texts: Tensor,
        positions: Tensor,
        visible: range,
        page_numbers: Tensor,
        rule: AttentionRule,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention [texts, n, heads, d] of queries to the pages of their texts, by torch.

        Args:
            query: Queries [texts, n, heads, d].
            texts: Numbers of the texts, int64 [texts].
            positions: Positions of the queries, int64 [texts, n].
            visible: Positions of all keys that a query sees.
            page_numbers: Numbers of each text's pages, as `TokenPositions.tables`.
            rule: Scale, window and soft cap.
            sinks: Score [heads] of a further key of each head, whose value is zero; None without one.
        """
        begin = visible.start // PAGE
        pages = page_numbers[texts, begin : -(-visible.stop // PAGE)]
        keys = self.keys[pages].permute(0, 2, 1, 4, 3).flatten(2, 3)
        values = self.values[pages].permute(0, 2, 1, 3, 4).flatten(2, 3)
        columns = torch.arange(begin * PAGE, begin * PAGE + keys.shape[2], device=query.device)
        last = positions.unsqueeze(-1)
        mask = columns <= last
        if rule.window:
            mask &= columns > last - rule.window
        mask = mask.unsqueeze(1)
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

    def _attend_compiled(
        self,
        functions: CompiledFunctions,
        inputs: AttentionInputs,
        rule: AttentionRule,
        token_positions: TokenPositions,
    ) -> Tensor:
        """Return the result of `attend` by a compiled function, which also stores keys and values."""
        scores = None if inputs.sinks is None else inputs.sinks.float()
        query, key, value = (with_contiguous_features(x) for x in (inputs.query, inputs.key, inputs.value))
        output, text_pages = query.new_empty(query.shape), token_positions.tables.shape[1]
        new = (
            token_positions.texts,
            token_positions.positions,
            token_positions.rotations,
            token_positions.tables,
        )
        paged = Paged(
            attention_arguments(query, key, inputs.tables, rule, scores),
            text_pages,
            self.keys.element_size(),
            *(x.data_ptr() for x in (self.keys, self.values, *new)),
        )
        memory = torch.empty(MAX_QUERIES * (text_pages * PAGE + 2 * self.layout.width))
        functions.library.attend_paged(paged, *map(heads_of, (query, key, value, output)), memory)
        return output


def _attend_by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rule: AttentionRule, sinks: Tensor | None
) -> Tensor:
    """Return the result of `_attend_to_pages` for keys [texts, groups, m, d] and a cap or sinks."""
    shared = query.shape[2] // keys.shape[1]
    keys, values = (x.repeat_interleave(shared, dim=1).float() for x in (keys, values))
    scores = (query.transpose(1, 2).float() @ keys.mT) * rule.scale
    if rule.cap:
        scores = rule.cap * (scores / rule.cap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink_scores = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return (probabilities @ values).transpose(1, 2).to(query.dtype)
