"""Gaps that the C library keeps between the tensors of a block, beside the saved bytes of other tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.comm.world import World
from hpctrain.costs.layer_bytes.activation_sizes import total
from hpctrain.costs.layer_bytes.byte_functions import allocator_gaps, saved_storages
from hpctrain.costs.part_bytes import PartBytes, part_bytes
from hpctrain.engine.choices.function_choice import with_planned_functions
from hpctrain.host.memory import LARGEST_KEPT
from tests.engines import LLAMA, small_deck, trainer

TORCH, COMPILED = ("machine.compile=false",), ("machine.compile=true",)


def planned_part(world: World, *keys: str) -> PartBytes:
    deck = with_planned_functions(small_deck(*keys))
    training = trainer(world, deck)
    (part,) = part_bytes(deck, training.engine.stage.models, False, "none")
    training.engine.close()
    return part


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        (TORCH, 2.4),
        ((*LLAMA, *TORCH), 3.5),
        ((*LLAMA, *COMPILED), 2.4),
        ((*LLAMA, *COMPILED, "model.query_key_norm=head"), 2.4),
        ((*LLAMA, *COMPILED, "model.query_key_norm=all"), 3.5),
        ((*LLAMA, *COMPILED, "model.norm_weight=none"), 3.5),
        ((*LLAMA, *COMPILED, "model.parallel_residual=two_norms"), 3.5),
        ((*LLAMA, *COMPILED, "model.experts.count=4"), 3.5),
    ],
)
def test_compiled_blocks_leave_fewer_gaps(world: World, keys: tuple[str, ...], factor: float) -> None:
    part = planned_part(world, *keys)
    saved = total(saved_storages(part.blocks[0], part.sizes))
    assert allocator_gaps(part.blocks[0], part.sizes) == int(factor * saved)


def test_large_tensors_leave_no_gaps(world: World) -> None:
    part = planned_part(world)
    block, tokens = part.blocks[0], LARGEST_KEPT // 4 // 32
    sizes = replace(part.sizes, tokens=tokens, rows=tokens)
    storages = saved_storages(block, sizes)
    largest = [each.bytes for each in storages if each.bytes > LARGEST_KEPT]
    assert len(largest) == 3  # those of queries, keys and values, and of the feed-forward part
    assert allocator_gaps(block, sizes) == int(2.4 * (total(storages) - sum(largest)))
    assert allocator_gaps(block, replace(sizes, tokens=64 * tokens, rows=64 * tokens)) == 0
