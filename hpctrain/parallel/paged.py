"""Keys and values of texts that grow, in pages, and the attention of new tokens to them.

A page has PAGE tokens of one text, and the same number in all layers; texts hold as many pages as they have
come to (arXiv 2309.06180). Keys are kept rotate, so that none is rotate again for each token behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.host.streams import start_copy
from hpctrain.parallel.kernels.function_library import HIGHEST, PAGE, AttentionArguments, Heads, Paged, padded
from hpctrain.parallel.kernels.layer_functions import CompiledFunctions, LayerFunctions, rotate


@dataclass(frozen=True)
class TokenPositions:
    """Where the rows of a pass stand, those of a text behind each other and in order.

    `runs` tells these in numbers: the text (-1: none's, rows that fill up, which stand all at the first
    position: they may be more than there are), the first position, how many.
    The same by row are `texts` and `positions`, int64 [n], and `tables` [texts, pages] are each text's pages.
    `real` are the rows of texts, int64 [m].
    """

    runs: Sequence[tuple[int, int, int]]
    texts: Tensor
    positions: Tensor
    tables: Tensor
    real: Tensor

    @staticmethod
    def of(runs: Sequence[tuple[int, int, int]], tables: Tensor) -> TokenPositions:
        """Those of some runs; all tensors go where the tables are."""
        texts = torch.tensor([text for text, _, count in runs for _ in range(count)])
        positions = torch.tensor(
            [first + (n if text >= 0 else 0) for text, first, count in runs for n in range(count)]
        )
        device, real = tables.device, (texts >= 0).nonzero().flatten()  # on the host
        texts, positions, real = (start_copy(each, device) for each in (texts, positions, real))
        return TokenPositions(runs, texts, positions, tables, real)


@dataclass(frozen=True)
class PageLayout:
    """How keys and values of a layer lie in memory: so many `heads` of them, of `head` features in `dtype`.

    Functions that are `compiled` turn keys in fp32, of which nothing is to be rounded away, and read features
    by sixteen.
    """

    heads: int
    head: int
    dtype: torch.dtype
    turned: bool
    compiled: bool

    @property
    def width(self) -> int:
        """Features of a head, filled up."""
        return padded(self.head) if self.compiled else self.head

    @property
    def key_dtype(self) -> torch.dtype:
        """Format of the keys."""
        return torch.float32 if self.compiled and self.turned else self.dtype

    @property
    def bytes(self) -> int:
        """Of a page in one layer."""
        return PAGE * self.heads * self.width * (self.key_dtype.itemsize + self.dtype.itemsize)


class LayerPages:
    """A layer's `keys` [pages, heads, width, PAGE] and `values` [pages, heads, PAGE, width]."""

    def __init__(self, form: PageLayout, pages: int, device: torch.device, functions: LayerFunctions) -> None:
        self.form, self.functions = form, functions
        self.keys = torch.zeros((pages, form.heads, form.width, PAGE), dtype=form.key_dtype, device=device)
        self.values = torch.zeros((pages, form.heads, PAGE, form.width), dtype=form.dtype, device=device)

    def copy(self, source: int, target: int) -> None:
        """What one page has, in another."""
        self.keys[target], self.values[target] = self.keys[source], self.values[source]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tables: Sequence[Tensor],
        scale: float | None,
        places: TokenPositions,
    ) -> Tensor:
        """As LayerFunctions.attend, of rows [n, 1, heads, d]: each attends to what its text has up to it, new
        keys and values included, which are kept. `tables` are those of a Rotary of all positions there are.
        """
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if isinstance(self.functions, CompiledFunctions):
            return self._compiled(self.functions, query, key, value, tables, scale, places)
        if tables:
            of_rows = [table[places.positions] for table in tables]
            query, key = rotate(query, *of_rows), rotate(key, *of_rows)
        self._keep(key.squeeze(1), value.squeeze(1), places)
        output = torch.zeros_like(query)
        singles, row = [], 0
        for text, first, count in places.runs:
            if text >= 0 and count == 1:
                singles.append((row, text, first))
            elif text >= 0:
                rows = slice(row, row + count)
                chosen = torch.full((1,), text, device=query.device)
                output[rows, 0] = self._seen(
                    query[rows, 0].unsqueeze(0), chosen, first + count, scale, places
                )[0]
            row += count
        if singles:
            rows_of, texts, positions = map(list, zip(*singles, strict=True))
            ends = max(positions) + 1
            at_rows, chosen, at = start_copy(torch.tensor([rows_of, texts, positions]), query.device)
            output[at_rows] = self._seen(query[at_rows], chosen, ends, scale, places, at)
        return output

    def _keep(self, key: Tensor, value: Tensor, places: TokenPositions) -> None:
        """Put keys and values [n, heads, d] into their pages."""
        there = places.real
        texts, positions = places.texts[there], places.positions[there]
        pages, lanes = places.tables[texts, positions // PAGE], positions % PAGE
        self.keys[pages, :, :, lanes] = key[there]
        self.values[pages, :, lanes] = value[there]

    def _seen(
        self,
        query: Tensor,
        texts: Tensor,
        ends: int,
        scale: float,
        places: TokenPositions,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Of queries [texts, n, heads, d], the last ones before `ends` or one of a text at its position."""
        pages = places.tables[texts, : -(-ends // PAGE)]
        keys = self.keys[pages].permute(0, 2, 1, 4, 3).flatten(2, 3)
        values = self.values[pages].permute(0, 2, 1, 3, 4).flatten(2, 3)
        columns = torch.arange(keys.shape[2], device=query.device)
        last = columns[ends - query.shape[1] : ends] if positions is None else positions
        mask = columns <= last.unsqueeze(1)
        mask = mask.unsqueeze(0).unsqueeze(0) if positions is None else mask.unsqueeze(1).unsqueeze(1)
        output = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[2] != keys.shape[1],
        )
        return output.transpose(1, 2)

    def _compiled(
        self,
        functions: CompiledFunctions,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tables: Sequence[Tensor],
        scale: float,
        places: TokenPositions,
    ) -> Tensor:
        rows, _, heads, head = query.shape
        operands = [x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value)]
        output = query.new_empty(query.shape)
        turning: list[int | None] = [table.data_ptr() for table in tables] or [None, None]
        across = places.tables.shape[1]
        paged = Paged(
            AttentionArguments(rows, 1, heads, key.shape[2], head, query.element_size(), scale, *turning),
            across,
            self.keys.element_size(),
            *(x.data_ptr() for x in (self.keys, self.values, places.texts, places.positions, places.tables)),
        )
        memory = torch.empty(HIGHEST * (across * PAGE + 2 * self.form.width))
        heads_of = [Heads(x.data_ptr(), *x.stride()[:3]) for x in (*operands, output)]
        functions.call("attend_paged", paged, *heads_of, memory)
        return output
