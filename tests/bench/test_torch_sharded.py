"""The benchmark of cut states: FSDP2 and DeepSpeed beside ours, further variants, one variant alone.

Tests of bench/torch_sharded.py, bench/train.py and bench/torch_model.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from hpctrain.bench.peers import start_gloo, stop_gloo
from hpctrain.bench.torch_model import TorchModel
from hpctrain.bench.torch_sharded import LEARNING_RATE, SHARDED_RIVALS, rank_tokens, sharded_step
from hpctrain.bench.train import TrainingWish, bench_train
from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from tests.engines import DECK, LLAMA, small_deck


def losses_of_plain_torch(deck: Deck, ranks: int, count: int, steps: int) -> list[float]:
    """Mean losses of the steps of all ranks' tokens in one process."""
    torch.manual_seed(deck.run.seed)
    model = TorchModel(ModelShape.of(deck, deck.model.vocabulary or 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    tokens = torch.cat([rank_tokens(deck, rank, count).flatten(0, 1) for rank in range(ranks)])
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", SHARDED_RIVALS)
def test_rivals_train_the_same_model(world: World, name: str) -> None:
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    deck = small_deck("model.dropout=0", "layout.zero=3", "run.threads=1")
    count = deck.batch.global_size // deck.batch.micro_size // world.size
    start_gloo(world)
    step = sharded_step(name, deck, world)
    losses = [float(world.everyone.all_reduce(step().clone()).item()) / world.size for _ in range(4)]
    stop_gloo()
    assert losses == pytest.approx(losses_of_plain_torch(deck, world.size, count, 4), rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_rivals_refuse_decks_in_words(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HpctrainError, match="--against fsdp2: needs a deck of data ranks only"):
        sharded_step("fsdp2", small_deck("layout.tensor=2"), world)
    with pytest.raises(HpctrainError, match="--against fsdp2: has no loss scale"):
        sharded_step("fsdp2", small_deck("precision.compute=fp16"), world)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(HpctrainError, match="`pip install deepspeed` would help"):
        sharded_step("deepspeed", small_deck(), world)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_variants_take_turns_and_stand_alone(
    world: World, mpi_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = mpi_tmp_path / "deck.toml", mpi_tmp_path / "figures.json"
    if world.rank == 0:
        path.write_text(DECK)
    world.everyone.barrier()
    wish = TrainingWish(1, 2, variants=("layout.zero=1", "layout.zero=3 memory.keep_gathered=1"))

    def measured(wish: TrainingWish) -> list[dict[str, object]]:
        assert bench_train(world, path, ["model.dropout=0"], wish, output) == 0
        world.everyone.barrier()
        rows: list[dict[str, object]] = json.loads(output.read_text())
        world.everyone.barrier()
        return rows

    rows = measured(wish)
    assert [row["name"] for row in rows] == [f"data {world.size}", *wish.variants]
    assert all(row["peak_bytes"] is None for row in rows)
    (row,) = measured(TrainingWish(1, 1, variants=wish.variants, only="layout.zero=1"))
    assert row["name"] == "layout.zero=1"
    assert isinstance(row["peak_bytes"], int) and row["peak_bytes"] > 50e6
    if world.rank == 0:
        assert "layout.zero=1: a rank had at most" in capsys.readouterr().out
    with pytest.raises(HpctrainError, match=r"--only fsdp2: is not among .* deck, layout.zero=1"):
        measured(TrainingWish(1, 1, variants=wish.variants, only="fsdp2"))
    with pytest.raises(HpctrainError, match=r"layout\.zero"):
        measured(TrainingWish(1, 1, variants=("layout.zero=7",)))


def test_the_deck_of_the_comparison_is_gpt2() -> None:
    path = Path(__file__).parents[2] / "inputs" / "bench" / "gpt-124m.toml"
    deck = parse_deck(path.read_text(), ())
    assert count(ModelShape.of(deck, deck.model.vocabulary or 0)).parameters == pytest.approx(124e6, rel=0.01)
    assert (deck.batch.sequence, deck.batch.micro_size) == (512, 1)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.experts=4", "model.experts = 4: the peers in plain torch have 0 alone"),
        ("model.query_key_norm=head", 'model.query_key_norm = "head": the peers in plain torch have "none"'),
    ],
)
def test_models_that_peers_do_not_have_are_refused(override: str, told: str) -> None:
    deck = small_deck(*LLAMA, override)
    with pytest.raises(HpctrainError) as caught:
        TorchModel(ModelShape.of(deck, 61))
    assert told in str(caught.value)
