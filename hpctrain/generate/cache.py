"""Cache of the keys and values of texts that grow, in pages that texts with a common beginning share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.costs.cache_plan import CachePlan
from hpctrain.model.attention.rotary import Rotary
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.attention.paged import LayerPages, TokenPositions
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.functions.function_library import PAGE


class KeyValueCache:
    """Places for texts, and the pages that each text has.

    Args:
        model: The model, or this rank's part of it.
        plan: Size of the cache.

    Attributes:
        layers: Pages of each block, by its number in the model.
        rotary_tables: Tables of a Rotary for all positions. Empty if the model rotates nothing, or each pass
            computes them.
        local_rotary_tables: Tables of blocks with windows.
        tables: Numbers of each text's pages, int64 [places, pages].
    """

    def __init__(self, model: Transformer, plan: CachePlan) -> None:
        self.plan, self.shape = plan, model.shape
        span, shape, device = model.span, model.shape, model.layer_context.tensor.device
        functions = model.layer_context.functions
        self.layers = {
            block: LayerPages(plan.layout, plan.pages, device, functions)
            for block in range(span.first, span.last)
        }
        self.rotary_tables: tuple[Tensor, ...] = ()
        self.local_rotary_tables: tuple[Tensor, ...] = ()
        self.local_blocks = frozenset(filter(shape.is_local, range(shape.layers)))
        self.rotated_blocks = frozenset(filter(shape.rotates, range(shape.layers)))
        if plan.layout.rotated and plan.rotary_tables:
            rotary = self._rotary(torch.arange(plan.window, device=device))
            self.rotary_tables, self.local_rotary_tables = rotary.tables, rotary.local_tables
        self.tables = torch.zeros((plan.sequences, plan.pages_per_sequence), dtype=torch.int64, device=device)
        self._free = list(range(plan.pages))[::-1]
        self._held: dict[int, list[int]] = {}
        self._users = [0] * plan.pages

    @property
    def bytes(self) -> int:
        """Bytes of all tensors of the cache."""
        of_layers = [tensor for layer in self.layers.values() for tensor in (layer.keys, layer.values)]
        distinct_tables = {
            id(table): table for table in (*self.rotary_tables, *self.local_rotary_tables)
        }.values()
        return sum(tensor.nbytes for tensor in (*of_layers, *distinct_tables, self.tables))

    @property
    def free_pages(self) -> int:
        """Number of pages that no text has."""
        return len(self._free)

    def open(self) -> int:
        """Reserve a place that no text has, and return its number."""
        free = next(place for place in range(self.plan.sequences) if place not in self._held)
        self._held[free] = []
        return free

    def close(self, place: int) -> None:
        """Release a place and the pages of its text."""
        for page in self._held.pop(place):
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def share(self, source: int, place: int, count: int) -> None:
        """Give the first `count` tokens of the text in `source` to an empty place.

        The texts share the pages that these tokens fill. The last page is copied if it is not full.
        """
        own, pages = self._held[place], self._held[source]
        assert not own and count <= len(pages) * PAGE, (own, pages, count)
        for page in pages[: count // PAGE]:
            self._have(place, page)
        if count % PAGE:
            copy = self._free.pop()
            for layer in self.layers.values():
                layer.copy(pages[count // PAGE], copy)
            self._have(place, copy)

    def begin(self, runs: Sequence[tuple[int, int, int]], text_lengths: Sequence[int]) -> CachePass:
        """Return the attention of a pass, after adding the pages that its tokens need.

        Args:
            runs: Place, first new position and number of new tokens of each text, see TokenPositions.
            text_lengths: Number of tokens of each text, on which scaled rotary positions may depend.
        """
        for place, first, count in runs:
            if place < 0:
                continue
            while len(self._held[place]) * PAGE < first + count:
                self._have(place, self._free.pop())
        by_row = self.plan.layout.rotated and not self.plan.rotary_tables
        places = TokenPositions.of(runs, self.tables, by_row)
        if not by_row:
            return CachePass(self, places, self.rotary_tables, self.local_rotary_tables)
        positions = places.positions.split([count for _, _, count in runs])
        rotaries = list(map(self._rotary, positions, text_lengths))
        tables = tuple(map(torch.cat, zip(*(rotary.tables for rotary in rotaries), strict=True)))
        local_tables = tuple(map(torch.cat, zip(*(rotary.local_tables for rotary in rotaries), strict=True)))
        return CachePass(self, places, tables, local_tables)

    def _rotary(self, positions: Tensor, text_length: int | None = None) -> Rotary:
        """Return the rotary tables of positions [s] of a text."""
        layout = self.plan.layout
        return Rotary.of(self.shape, positions, layout.dtype, layout.head_size, text_length)

    def _have(self, place: int, page: int) -> None:
        """Append a page to those of a place."""
        held = self._held[place]
        self.tables[place, len(held)] = page
        held.append(page)
        self._users[page] += 1


class CachePass:
    """Attention of one forward pass to a KeyValueCache; implements Cache.

    Args:
        cache: The cache.
        places: Text and position of each row of the pass.
        tables: Rotary tables, whose rows `places.rotations` names; empty if nothing is rotated.
        local_tables: Rotary tables of blocks with windows.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        places: TokenPositions,
        tables: tuple[Tensor, ...],
        local_tables: tuple[Tensor, ...],
    ) -> None:
        self.cache, self.places, self.tables, self.local_tables = cache, places, tables, local_tables

    def attend(self, block: int, inputs: AttentionInputs, rule: AttentionRule) -> Tensor:
        """Return the result of attention in a block of the model, with the keys and values in the cache."""
        layer = self.cache.layers[block]
        tables = self.tables if block in self.cache.rotated_blocks else ()
        if block in self.cache.local_blocks:
            tables = self.local_tables
        return layer.attend(inputs._replace(tables=tables), rule, self.places)
