"""The benchmark of mixtures: what is timed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpctrain.bench.mixture_speed import _MeasuredLayers, bench_mixture
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape
from tests.engines import DECK, LLAMA, alone, small_deck

MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=40")


@pytest.mark.mpi(max_size=2)
def test_steps_layers_and_exchanges_take_turns(world: World, mpi_tmp_path: Path) -> None:
    deck, figures = mpi_tmp_path / "deck.toml", mpi_tmp_path / "figures.json"
    if world.rank == 0:
        deck.write_text(DECK)
    world.everyone.barrier()
    layout = (f"layout.expert={world.size}",)
    bench_mixture(world, deck, [*MIXTURE, *layout], 1, 2, figures)
    world.everyone.barrier()
    told = json.loads(figures.read_text())
    series = [told[name] for name in ("step_s", "mixture_s", "dense_s", "exchange_s")]
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in series)
    assert (told["spread"] is None) == (told["whole_s"] is None) == (world.size == 1)


def test_layers_that_are_compared_multiply_as_much(world: World) -> None:
    """But for the router; and both leave gradients of every weight."""
    deck = small_deck(*MIXTURE, "model.experts.shared=1")
    layers = _MeasuredLayers(deck, ModelShape.of(deck, 61), alone(world), torch.device("cpu"))
    dense = 3 * 32 * 3 * 40
    assert layers.flops_ratio == pytest.approx((dense + 4 * 32) / dense)
    layers.mixture()
    layers.dense()
    weights = [p for layer in (layers._mixture, layers._dense) for p in layer.parameters()]
    assert len(weights) == 3 + 3 + 3
    assert all(weight.gradient.any() for weight in weights)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "told"),
    [(LLAMA, r"model\.experts"), ((*MIXTURE, "layout.pipeline=2"), "rank")],
)
def test_what_cannot_be_timed_is_refused(
    world: World, tmp_path: Path, changes: tuple[str, ...], told: str
) -> None:
    deck = tmp_path / "deck.toml"
    deck.write_text(DECK)
    with pytest.raises(HpctrainError, match=told):
        bench_mixture(world.single_rank_world(), deck, changes, 1, 1, None)
