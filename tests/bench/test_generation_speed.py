"""The benchmark of generation: what is timed makes as many tokens, and what cannot be timed is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.bench.generation_speed import bench_generate
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from tests.engines import DECK, LLAMA


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_all_are_timed_in_turns(
    world: World, mpi_tmp_path: Path, family: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    deck, figures = mpi_tmp_path / "deck.toml", mpi_tmp_path / "figures.json"
    if world.rank == 0:
        deck.write_text(DECK)
    world.everyone.barrier()
    bench_generate(world, deck, family, prompts=5, tokens=8, rounds=2, output=figures)
    world.everyone.barrier()
    found = json.loads(figures.read_text())
    assert len(found["tokens_per_s"]) == 4
    assert all(rate > 0 for rate in found["tokens_per_s"].values())
    assert all(len(seconds) == 2 for seconds in found["seconds"].values())
    assert "transformers, with cache" in capsys.readouterr().out or world.rank


def test_texts_longer_than_the_window_are_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "deck.toml").write_text(DECK)
    with pytest.raises(HpctrainError, match=r"batch\.sequence = 32: must be at least 41"):
        bench_generate(world.single_rank_world(), tmp_path / "deck.toml", [], 2, 32, 1, None)


def test_models_that_write_nothing_are_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "deck.toml").write_text(DECK)
    with pytest.raises(HpctrainError, match=r"kind=reward: is unsupported: the model generates no text"):
        bench_generate(
            world.single_rank_world(), tmp_path / "deck.toml", ["objective.kind=reward"], 2, 8, 1, None
        )
