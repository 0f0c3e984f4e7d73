"""Gaps that the C library keeps between the tensors of a block, beside the saved bytes of other tests.

Tests of costs/layer_bytes/byte_functions.py beside costs/layer_bytes/block_bytes.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.comm.world import World
from hpctrain.costs.layer_bytes.activation_sizes import total
from hpctrain.costs.layer_bytes.byte_functions import (
    allocator_gaps,
    gaps_between_tensors,
    saved_storages,
    workspace_bytes,
)
from hpctrain.costs.part_bytes import PartBytes, part_bytes
from hpctrain.engine.choices.function_choice import with_planned_functions
from hpctrain.host.memory import LARGEST_KEPT
from tests.engines import LLAMA, small_deck, trainer

TORCH, COMPILED = ("machine.compile=false",), ("machine.compile=true",)
BF16 = ("precision.compute=bf16",)


def planned_part(world: World, *keys: str) -> PartBytes:
    deck = with_planned_functions(small_deck(*keys))
    training = trainer(world, deck)
    (part,) = part_bytes(deck, training.engine.stage.models, False, "none")
    training.engine.close()
    return part


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        (TORCH, 0.07),
        ((*LLAMA, *TORCH), 0.07),
        ((*LLAMA, *COMPILED), 0.07),
        ((*LLAMA, *COMPILED, "model.query_key_norm=head"), 0.07),
        ((*LLAMA, *COMPILED, "model.query_key_norm=all"), 0.17),
        ((*LLAMA, *TORCH, "model.query_key_norm=all"), 0.34),
        ((*LLAMA, *COMPILED, "model.norm_weight=none"), 0.17),
        ((*LLAMA, *COMPILED, "model.norm_weight=none", *BF16), 0.35),
        ((*LLAMA, *COMPILED, "model.parallel_residual=two_norms"), 0.17),
        ((*LLAMA, *COMPILED, "model.experts.count=4"), 0.17),
        ((*LLAMA, *COMPILED, "model.experts.count=4", *BF16), 0.5),
        ((*LLAMA, *TORCH, "model.experts.count=4", *BF16), 1.0),
    ],
)
def test_gaps_depend_on_what_a_block_frees_between_saved_tensors(
    world: World, keys: tuple[str, ...], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = planned_part(world, *keys)
    saved = total(saved_storages(part.blocks[0], part.sizes))
    assert allocator_gaps(part.blocks[0], part.sizes) == int(1.4 * saved)
    for version, planned in (("glibc 2.36", share), ("glibc 2.38", max(0.07, 0.4 * share))):
        monkeypatch.setattr("os.confstr", lambda _, version=version: version)
        gaps = gaps_between_tensors(part.blocks[0], part.sizes)
        assert gaps == pytest.approx(planned * saved, abs=1)


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


def test_large_tensors_leave_no_gaps(world: World) -> None:
    part = planned_part(world)
    block, tokens = part.blocks[0], LARGEST_KEPT // 4 // 32
    sizes = replace(part.sizes, tokens=tokens, rows=tokens)
    storages = saved_storages(block, sizes)
    largest = [each.bytes for each in storages if each.bytes > LARGEST_KEPT]
    assert len(largest) == 3  # those of queries, keys and values, and of the feed-forward part
    assert allocator_gaps(block, sizes) == int(1.4 * (total(storages) - sum(largest)))
    for gaps in (allocator_gaps, gaps_between_tensors):
        assert gaps(block, replace(sizes, tokens=64 * tokens, rows=64 * tokens)) == 0
