"""transformers' Mixtral as a peer: of the deck's sizes, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpctrain.bench.peers.mixtral import MIXTRAL_PEERS, mixtral, peer
from hpctrain.bench.training_speed import TrainingBenchOptions, bench_train
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from tests.engines import DECK, LLAMA, small_deck

pytest.importorskip("transformers")

MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=40", "model.tied=false")


@pytest.mark.parametrize("experts", MIXTRAL_PEERS.values())
def test_it_has_the_sizes_of_the_deck(experts: str) -> None:
    shape = ModelShape.of(small_deck(*MIXTURE), 61)
    model = mixtral(shape, experts)
    assert sum(p.numel() for p in model.parameters()) == count(shape).parameters
    assert model.config._experts_implementation == experts


@pytest.mark.parametrize("name", MIXTRAL_PEERS)
def test_its_step_trains_every_tensor(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpctrain.bench.peers import mixtral as module

    made = []
    monkeypatch.setattr(module, "mixtral", lambda *args: made.append(mixtral(*args)) or made[0])
    step = peer(name, small_deck(*MIXTURE), world.single_rank_world(), ())
    before = {name: p.detach().clone() for name, p in made[0].named_parameters()}
    step()
    assert all(not torch.equal(before[name], p) for name, p in made[0].named_parameters())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (LLAMA, "requires a mixture"),
        ((*MIXTURE, "model.experts.shared=1"), r"model.experts.shared = 1: must be 0"),
        ((*MIXTURE, "model.experts.router=sigmoid"), "router = 'sigmoid'"),
    ],
)
def test_what_it_cannot_be_is_refused(world: World, changes: tuple[str, ...], told: str) -> None:
    with pytest.raises(HpctrainError, match=told):
        peer("transformers-eager", small_deck(*changes), world.single_rank_world(), ())


def test_it_takes_turns_with_ours(world: World, tmp_path: Path) -> None:
    deck, figures = tmp_path / "deck.toml", tmp_path / "figures.json"
    deck.write_text(DECK)
    wish = TrainingBenchOptions(1, 1, against=("transformers-eager",))
    bench_train(world.single_rank_world(), deck, MIXTURE, wish, figures)
    names = [row["name"] for row in json.loads(figures.read_text())["rows"]]
    assert names == ["one rank", "transformers-eager"]
