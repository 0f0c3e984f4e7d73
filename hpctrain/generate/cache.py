"""The cache of keys and values of texts that grow, and who has which of its pages."""

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
    """Places for texts, and the pages that each has come to; of those with a beginning in common some are the
    same.
    """

    def __init__(self, model: Transformer, plan: CachePlan) -> None:
        self.plan = plan
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
        if plan.layout.rotated:
            positions = torch.arange(plan.window, device=device)
            rotary = Rotary.of(shape, positions, plan.layout.dtype, plan.layout.head_size)
            self.rotary_tables, self.local_rotary_tables = rotary.tables, rotary.local_tables
        self.tables = torch.zeros((plan.sequences, plan.pages_per_sequence), dtype=torch.int64, device=device)
        self._free = list(range(plan.pages))[::-1]
        self._held: dict[int, list[int]] = {}
        self._users = [0] * plan.pages

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        of_layers = [tensor for layer in self.layers.values() for tensor in (layer.keys, layer.values)]
        distinct_tables = {
            id(table): table for table in (*self.rotary_tables, *self.local_rotary_tables)
        }.values()
        return sum(tensor.nbytes for tensor in (*of_layers, *distinct_tables, self.tables))

    @property
    def free_pages(self) -> int:
        """Those that no text has."""
        return len(self._free)

    def open(self) -> int:
        """A place that no text has, one of those that there are."""
        free = next(place for place in range(self.plan.sequences) if place not in self._held)
        self._held[free] = []
        return free

    def close(self, place: int) -> None:
        """Give the pages of its text back."""
        for page in self._held.pop(place):
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def share(self, source: int, place: int, count: int) -> None:
        """Let a text that has nothing yet have the first `count` tokens of another one: pages that these fill
        are both texts', and what is in the next one is copied.
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

    def begin(self, runs: Sequence[tuple[int, int, int]]) -> CachePass:
        """What a pass attends to, whose rows are these runs, see TokenPositions; places get the pages for
        them."""
        for place, first, count in runs:
            if place < 0:
                continue
            while len(self._held[place]) * PAGE < first + count:
                self._have(place, self._free.pop())
        return CachePass(self, TokenPositions.of(runs, self.tables))

    def _have(self, place: int, page: int) -> None:
        """Let a page be the next one of a place."""
        held = self._held[place]
        self.tables[place, len(held)] = page
        held.append(page)
        self._users[page] += 1


class CachePass:
    """One pass over some rows; a Cache."""

    def __init__(self, cache: KeyValueCache, places: TokenPositions) -> None:
        self.cache, self.places = cache, places

    def attend(self, block: int, inputs: AttentionInputs, rule: AttentionRule) -> Tensor:
        """Return the result of attention in a block of the model, with the keys and values in the cache."""
        layer = self.cache.layers[block]
        tables = self.cache.rotary_tables if block in self.cache.rotated_blocks else ()
        if block in self.cache.local_blocks:
            tables = self.cache.local_rotary_tables
        return layer.attend(inputs._replace(tables=tables), rule, self.places)
