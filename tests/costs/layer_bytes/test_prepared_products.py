"""Products that oneDNN prepares on a CPU: each matrix in each pass, and each number of rows."""

from __future__ import annotations

import pytest

from hpctrain.comm.world import World
from hpctrain.costs.layer_bytes import prepared_products
from hpctrain.costs.layer_bytes.prepared_products import prepared_bytes
from hpctrain.costs.part_bytes import part_bytes
from tests.engines import LLAMA, small_deck, trainer

BF16 = (*LLAMA, "model.tied=true", "precision.compute=bf16")


def prepared(world: World, *keys: str, gpu: bool = False) -> float:
    """Return the number of products that the layers of a deck prepare."""
    deck = small_deck(*BF16, *keys)
    training = trainer(world, deck)
    (part,) = part_bytes(deck, training.engine.stage.models, gpu, "none")
    training.engine.close()
    return prepared_bytes(part.part.layers, part.sizes, 1)


def test_each_matrix_is_prepared_once_in_each_pass(world: World) -> None:
    # Queries with keys and values, output, gate with up, down, and the output layer.
    assert prepared(world) == 3 * 5
    assert prepared(world, "model.layers=5") == 3 * 5
    assert prepared(world, "precision.compute=fp32") == prepared(world, gpu=True) == 0


def test_products_in_fp32_are_prepared_by_onednn_alone(world: World) -> None:
    experts = ("model.experts.count=4", "model.experts.mlp=40")
    assert prepared(world, "precision.compute=fp32", "machine.products=onednn") == 3 * 5
    assert prepared(world, "precision.compute=fp32", "machine.products=onednn", *experts) == 3 * 3
    assert prepared(world, "machine.products=fp32-onednn") == 3 * 5
    assert prepared(world, "machine.products=fp32") == 0


def test_experts_have_several_numbers_of_rows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = ("model.experts.count=4", "model.experts.mlp=40", "batch.sequence=128", "batch.micro_size=4")
    # 512 tokens go to 2 of 4 experts: 256 rows if they are even, at most 512 = 8 x 64.
    assert prepared(world, *experts) == 3 * 3 + 3 * 2 * 8
    # An expert of 16 has 64 rows if they are even, and four times as many at most.
    assert prepared(world, *experts, "model.experts.count=16") == 3 * 3 + 3 * 2 * 4
    monkeypatch.setattr(prepared_products, "_MOST_PRODUCTS", 10)
    assert prepared(world, *experts) == 3 * 3 + 10
