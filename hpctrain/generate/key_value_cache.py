"""Cache of keys and values for texts that are generated, in pages that texts with the same prefix share."""

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
    """Paged key and value cache of this rank, with a slot for each text that is generated.

    The methods are local: ranks that share a model make the same calls, so that their pages have the same
    numbers.

    Args:
        model: The model, or this rank's part of it.
        plan: Size of the cache.

    Attributes:
        layer_pages: Pages of each block, by the block's number in the model.
        rotary_tables: Tables of a Rotary for all positions. Empty if the model has no rotary positions, or if
            each pass computes them.
        local_rotary_tables: The same for blocks with windows.
        page_tables: Page numbers of the text in each slot, int64 [slots, pages].
    """

    def __init__(self, model: Transformer, plan: CachePlan) -> None:
        self.plan, self.shape = plan, model.shape
        span, shape, device = model.span, model.shape, model.layer_context.tensor.device
        functions = model.layer_context.functions
        self.layer_pages = {
            block: LayerPages(plan.layout, plan.pages, device, functions)
            for block in range(span.first, span.last)
        }
        self.rotary_tables: tuple[Tensor, ...] = ()
        self.local_rotary_tables: tuple[Tensor, ...] = ()
        self.local_blocks = frozenset(filter(shape.is_local, range(shape.layers)))
        self.rotated_blocks = frozenset(filter(shape.rotates, range(shape.layers)))
        if plan.layout.rotated and plan.rotary_tables:
            rotary = self._rotary(torch.arange(plan.positions, device=device))
            self.rotary_tables, self.local_rotary_tables = rotary.tables, rotary.local_tables
        table_shape = plan.sequences, plan.pages_per_sequence
        self.page_tables = torch.zeros(table_shape, dtype=torch.int64, device=device)
        self._free_pages = list(range(plan.pages))[::-1]
        self._pages_by_slot: dict[int, list[int]] = {}
        self._reference_counts = [0] * plan.pages

    @property
    def bytes(self) -> int:
        """Number of bytes of all tensors of the cache."""
        of_layers = [tensor for pages in self.layer_pages.values() for tensor in (pages.keys, pages.values)]
        distinct_tables = {
            id(table): table for table in (*self.rotary_tables, *self.local_rotary_tables)
        }.values()
        return sum(tensor.nbytes for tensor in (*of_layers, *distinct_tables, self.page_tables))

    @property
    def free_pages(self) -> int:
        """Number of pages that no text uses."""
        return len(self._free_pages)

    def allocate_slot(self) -> int:
        """Reserve a free slot, without pages, and return its number."""
        slot = next(each for each in range(self.plan.sequences) if each not in self._pages_by_slot)
        self._pages_by_slot[slot] = []
        return slot

    def free_slot(self, slot: int) -> None:
        """Release a slot, and its pages that no other slot uses."""
        for page in self._pages_by_slot.pop(slot):
            self._reference_counts[page] -= 1
            if not self._reference_counts[page]:
                self._free_pages.append(page)

    def share_prefix(self, source: int, slot: int, count: int) -> None:
        """Let an empty slot begin with the first tokens of another slot's text.

        The slots share the pages that these tokens fill. A page that they fill in part is copied.

        Args:
            source: Slot with at least `count` tokens.
            slot: Slot that has no tokens.
            count: Number of tokens.
        """
        own, pages = self._pages_by_slot[slot], self._pages_by_slot[source]
        assert not own and count <= len(pages) * PAGE, (own, pages, count)
        for page in pages[: count // PAGE]:
            self._append_page(slot, page)
        if count % PAGE:
            copy = self._free_pages.pop()
            for layer in self.layer_pages.values():
                layer.copy(pages[count // PAGE], copy)
            self._append_page(slot, copy)

    def start_pass(self, runs: Sequence[tuple[int, int, int]], text_lengths: Sequence[int]) -> CachePass:
        """Allocate the pages for the new tokens of a forward pass, and return the attention of that pass.

        Args:
            runs: Slot, first new position and number of new tokens of each text, see `TokenPositions.runs`.
                Slot -1 is padding.
            text_lengths: Number of tokens of each text, on which scaled rotary positions may depend.
        """
        for slot, first, count in runs:
            if slot < 0:
                continue
            while len(self._pages_by_slot[slot]) * PAGE < first + count:
                self._append_page(slot, self._free_pages.pop())
        by_row = self.plan.layout.rotated and not self.plan.rotary_tables
        token_positions = TokenPositions.of(runs, self.page_tables, by_row)
        if not by_row:
            return CachePass(self, token_positions, self.rotary_tables, self.local_rotary_tables)
        positions = token_positions.positions.split([count for _, _, count in runs])
        rotaries = list(map(self._rotary, positions, text_lengths))
        tables = tuple(map(torch.cat, zip(*(rotary.tables for rotary in rotaries), strict=True)))
        local_tables = tuple(map(torch.cat, zip(*(rotary.local_tables for rotary in rotaries), strict=True)))
        return CachePass(self, token_positions, tables, local_tables)

    def _rotary(self, positions: Tensor, text_length: int | None = None) -> Rotary:
        """Return the rotary tables of positions [s] of a text."""
        layout = self.plan.layout
        return Rotary.of(self.shape, positions, layout.dtype, layout.head_size, text_length)

    def _append_page(self, slot: int, page: int) -> None:
        pages = self._pages_by_slot[slot]
        self.page_tables[slot, len(pages)] = page
        pages.append(page)
        self._reference_counts[page] += 1


class CachePass:
    """Attention of one forward pass to a KeyValueCache; implements `Cache` of `hpctrain.model.inputs`.

    Args:
        cache: The cache.
        token_positions: Slot and position of each row of the pass.
        tables: Rotary tables, indexed by `token_positions.rotations`. Empty without rotary positions.
        local_tables: Rotary tables of blocks with windows.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        token_positions: TokenPositions,
        tables: tuple[Tensor, ...],
        local_tables: tuple[Tensor, ...],
    ) -> None:
        self.cache, self.token_positions = cache, token_positions
        self.tables, self.local_tables = tables, local_tables

    def attend(self, block: int, inputs: AttentionInputs, rule: AttentionRule) -> Tensor:
        """Store the keys and values of a block in the cache, and return its attention [n, 1, heads, d].

        Args:
            block: Number of the block in the model.
            inputs: Queries, keys and values [n, 1, heads, d] of the n rows of the pass, before rotation.
            rule: Scale, window and soft cap.
        """
        tables = self.tables if block in self.cache.rotated_blocks else ()
        if block in self.cache.local_blocks:
            tables = self.local_tables
        return self.cache.layer_pages[block].attend(
            inputs._replace(tables=tables), rule, self.token_positions
        )
