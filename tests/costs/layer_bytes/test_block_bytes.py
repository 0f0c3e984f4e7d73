"""Temporary bytes of a block, beside the saved bytes of other tests.

Tests of costs/layer_bytes/byte_functions.py beside costs/layer_bytes/block_bytes.py.
"""

from __future__ import annotations

from dataclasses import replace

from hpctrain.comm.world import World
from hpctrain.costs.layer_bytes.byte_functions import workspace_bytes
from hpctrain.costs.part_bytes import PartBytes, part_bytes
from hpctrain.engine.choices.function_choice import with_planned_functions
from tests.engines import small_deck, trainer

TORCH, COMPILED = ("machine.compile=false",), ("machine.compile=true",)


def planned_part(world: World, *keys: str) -> PartBytes:
    deck = with_planned_functions(small_deck(*keys))
    training = trainer(world, deck)
    (part,) = part_bytes(deck, training.engine.stage.models, False, "none")
    training.engine.close()
    return part


def test_torch_has_matrices_of_capped_scores(world: World) -> None:
    keys = ("model.family=gemma2", "model.attention_cap=50", "batch.sequence=64")
    block, compiled = (planned_part(world, *keys, *each) for each in (TORCH, COMPILED))
    sizes, attention = block.sizes, block.blocks[0].attention
    queries, keys_, _ = attention.inner.split_sizes
    scores = sizes.micro_size * (queries // attention.head_size) * 64 * 64
    expected = 4 * 6 * scores + 4 * sizes.tokens * (queries + 2 * keys_)
    assert workspace_bytes(attention, sizes) == expected
    assert workspace_bytes(compiled.blocks[0].attention, sizes) < expected
    # A tile has at most 512 rows and columns.
    longer = replace(sizes, tokens=16 * sizes.tokens)
    growth = workspace_bytes(attention, longer) - 16 * 4 * sizes.tokens * (queries + 2 * keys_)
    assert growth == 4 * 6 * (scores // 64**2) * 512**2
