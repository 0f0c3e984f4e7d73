"""Maxima of weights that are found once a step are those that every product finds by itself."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.parallel.fp8.quantized_matmul import WEIGHTS, QuantizedMatmul
from hpctrain.sharding.weight_maxima import WeightMaxima, products_in_8_bits
from tests.engines import Trainer, small_deck, trainer
from tests.parallel.fp8.scales import KEYS

LAYOUTS = [
    pytest.param((1, "tensor", ()), marks=pytest.mark.mpi(min_size=1, max_size=1), id="one"),
    pytest.param(
        (2, "tensor", ("layout.tensor=2",)), marks=pytest.mark.mpi(min_size=2, max_size=2), id="whole"
    ),
    pytest.param((2, "row", ("layout.tensor=2",)), marks=pytest.mark.mpi(min_size=2, max_size=2), id="rows"),
    pytest.param(
        (4, "tensor", ("layout.tensor=2", "layout.zero=3")),
        marks=pytest.mark.mpi(min_size=4, max_size=4),
        id="cut",
    ),
]


def products(run: Trainer) -> list[QuantizedMatmul]:
    return products_in_8_bits(layer for model in run.engine.stage.models for layer in model.layers)


def reductions(run: Trainer) -> int:
    """Return the number of all-reduces over the tensor axis."""
    rows = run.world.ledger.rows()
    return sum(row.calls for row in rows if row.axis == "tensor" and row.operation == "all_reduce")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_equal_with_fewer_reductions(
    world: World, layout: tuple[int, str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recipe, keys = layout
    deck = small_deck(*KEYS, f"precision.fp8={recipe}", *keys)
    run = trainer(world, deck)
    before = reductions(run)
    losses = [(step.loss, step.grad_norm) for step in run.train(3)]
    once = reductions(run) - before
    assert products(run) and not any(product._weight_maxima for product in products(run))
    monkeypatch.setattr(WeightMaxima, "provide_maxima", lambda _: nullcontext())
    plain = trainer(world, deck)
    before = reductions(plain)
    assert [(step.loss, step.grad_norm) for step in plain.train(3)] == losses
    each = reductions(plain) - before
    if "layout.tensor=2" in keys:
        steps, micro_batches = 3, 4 // (world.size // 2)
        uses = {"tensor": 2, "row": 1}[recipe] * micro_batches
        assert each - once == steps * (uses * len(products(run)) - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_maxima_are_those_of_whole_matrices(world: World, layout: tuple[int, str, tuple[str, ...]]) -> None:
    _, recipe, keys = layout
    run = trainer(world, small_deck(*KEYS, f"precision.fp8={recipe}", *keys))
    own = {
        segment.parameter.shard.name: (segment.parameter.shard, segment.view(flat).float().numpy())
        for bucket in run.engine.stage.buckets
        for flat in [bucket.gather_owned(bucket.owned_values)]
        for segment in bucket.segments
    }
    everything = world.everyone.all_gather_object(own)

    def whole(product: QuantizedMatmul) -> np.ndarray:
        matrices = []
        for weight in product.weights:
            matrices.append(np.full(weight.shard.shape, np.nan))
            for shard, piece in (rank[weight.shard.name] for rank in everything):
                place = (slice(s, s + n) for s, n in zip(shard.start, shard.local, strict=True))
                matrices[-1][tuple(place)] = np.abs(piece)
        return np.concatenate(matrices)

    with run.engine.stage.pass_context("test"):
        known = [(each, *one) for each in products(run) for one in each._weight_maxima.items()]
        assert len(known) == (1 if recipe == "row" else 2) * len(products(run))
        for product, dims, found in known:
            along = None if recipe == "tensor" else 1 if dims == ("outputs", "inputs") else 0
            assert np.array_equal(found.flatten().numpy(), whole(product).max(along).reshape(-1)), dims


@pytest.mark.mpi(min_size=1, max_size=1)
def test_evaluation_uses_the_maxima_of_its_own_weights(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("precision.fp8=tensor", "optimizer.name=schedule-free")
    run = trainer(world, small_deck(*KEYS, *keys))
    run.train(2)
    known: list[bool] = []
    computed = QuantizedMatmul._forward

    def watched(self: QuantizedMatmul, *of: Any) -> Any:
        known.append(self._weight_maxima[WEIGHTS].item() == self.weight().abs().max().item())
        return computed(self, *of)

    monkeypatch.setattr(QuantizedMatmul, "_forward", watched)
    trained = [float(each.weight().abs().max()) for each in products(run)]
    with run.engine.stage.optimizer.evaluation_weights():
        shown = [float(each.weight().abs().max()) for each in products(run)]
    assert trained != shown
    run.evaluate(run.step.batches, 4)
    assert known and all(known)
