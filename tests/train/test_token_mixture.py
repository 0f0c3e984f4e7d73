"""Runs on mixtures and on several token files (data/data_mixture.py, data/token_files.py) in train/run.py."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.replay import replay
from hpctrain.train.run import resume, run_deck
from tests.data.preparing import prepare

DECK = """
[run]
title = "mixed"
steps = 6
evaluate_every = 3
[model]
family = "llama"
layers = 1
hidden = 16
heads = 2
[data]
validation = 0.1
[[data.mixture]]
tokens = "a.h5"
weight = 5
[[data.mixture]]
tokens = ["b.h5", "c.h5"]
weight = 3
name = "others"
[batch]
global_size = 8
sequence = 16
[checkpoint]
every = 3
[machine]
peak_flops = 1e10
"""
TEXTS = {"a": "the quick brown fox. ", "b": "jumps over ", "c": "the lazy dog, ", "d": "another text. "}


def make(world: World, folder: Path) -> None:
    if world.rank == 0:
        for name, text in TEXTS.items():
            Path(f"{name}.txt").write_text(text * 30)
        Path("deck.toml").write_text(DECK)
    world.everyone.barrier()
    for name in TEXTS:
        prepare(world, Path(f"{name}.h5"), [f"{name}.txt"])


@pytest.fixture
def work(world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(mpi_tmp_path)
    make(world, mpi_tmp_path)
    return mpi_tmp_path


def losses(folder: str) -> list[tuple[float, float]]:
    """Those of training and, where there was an evaluation, of what is held out."""
    return [
        (row["loss"], row.get("validation_loss", 0.0)) for row in read_metrics(Path(folder) / "metrics.jsonl")
    ]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_mixture_trains_goes_on_and_is_known_again(world: World, work: Path) -> None:
    assert run_deck(world, Path("deck.toml"), []) == 0
    path = Path("runs/mixed/checkpoints/step-00000003.h5")
    assert resume(world, path, ["run.dir=again"]) == 0
    assert losses("again") == losses("runs/mixed")[3:]
    assert replay(world, path, None, [], None, lambda _: None) == 0
    other = 'data.mixture=[{tokens="a.h5", weight=5}, {tokens=["b.h5", "d.h5"], weight=3, name="others"}]'
    with pytest.raises(HpctrainError, match=r"is not the mixture that .*step-00000003.h5 was trained on"):
        replay(world, path, None, [other], None, lambda _: None)
    assert resume(world, path, ["run.dir=third", other]) == 0
    if world.rank == 0:
        log = Path("runs/mixed/log.txt").read_text()
        assert "a mixture of 2 entries: 1.38K tokens; 128 per step, " in log
        assert "  a: 0.625 of all samples; 36 sequences (631 tokens), 0.833 epochs" in log
        assert "  others: 0.375 of all samples; 42 sequences (752 tokens)" in log
        assert "is not the mixture that" in Path("third/log.txt").read_text()
        assert read_state(path)["corpus"]["tokens"] == 1383
    world.everyone.barrier()


def test_resumed_on_other_ranks_in_an_epoch(
    launch: Callable[..., subprocess.CompletedProcess[str]],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(world, tmp_path)
    done = launch(2, "-m", "hpctrain", "run", "deck.toml", "--set", "checkpoint.keep=9")
    assert done.returncode == 0, done.stderr
    for ranks, keys in ((1, ["batch.micro_size=4"]), (4, ["layout.zero=2"]), (2, ["layout.tensor=2"])):
        folder = f"on-{ranks}"
        changes = [part for key in [f"run.dir={folder}", *keys] for part in ("--set", key)]
        done = launch(ranks, "-m", "hpctrain", "resume", "runs/mixed/checkpoints/step-00000003.h5", *changes)
        assert done.returncode == 0, done.stderr
        for mine, whole in zip(losses(folder), losses("runs/mixed")[3:], strict=True):
            assert mine == pytest.approx(whole, rel=2e-6)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_file_cut_in_shards_trains_the_same(world: World, work: Path) -> None:
    """Documents in two files, or in one, are the same tokens: so all losses are the same."""
    prepare(world, Path("both.h5"), ["b.txt", "c.txt"])
    keys = ["data.mixture=", "data.validation=0.2"]
    assert run_deck(world, Path("deck.toml"), [*keys, "run.dir=one", "data.tokens=both.h5"]) == 0
    assert run_deck(world, Path("deck.toml"), [*keys, "run.dir=two", "data.tokens=[bc].h5"]) == 0
    assert losses("one") == losses("two")
    if world.rank == 0:
        assert "[bc].h5: 752 tokens in 2 files" in Path("two/log.txt").read_text()
        shutil.move("c.h5", "e.h5")
    world.everyone.barrier()
    with pytest.raises(HpctrainError, match=r"^data.tokens = c.h5: no such file"):
        resume(world, Path("two"), ['data.tokens=["b.h5", "c.h5"]', "run.steps=7"])


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_of_tokens_and_of_epochs(world: World, work: Path) -> None:
    """What the deck says of both comes out in metrics and log; a run goes on to more epochs."""
    keys = ["data.mixture=", "data.tokens=a.h5", "data.validation=0", "run.evaluate_every=0"]
    assert run_deck(world, Path("deck.toml"), [*keys, "run.dir=some", "run.tokens=500"]) == 0
    assert run_deck(world, Path("deck.toml"), [*keys, "run.dir=all", "run.epochs=1"]) == 0
    assert resume(world, Path("all"), ["run.epochs=1.5"]) == 0
    assert run_deck(world, Path("deck.toml"), ["run.dir=mixed", "run.epochs=0.5"]) == 0
    with pytest.raises(HpctrainError, match=r"deck.toml:4: run.epochs|--set run.epochs=1.*no such file"):
        run_deck(world, Path("deck.toml"), [*keys, "run.dir=no", "run.epochs=1", "data.tokens=no.h5"])
    if world.rank == 0:
        some, every = (list(read_metrics(Path(name) / "metrics.jsonl")) for name in ("some", "all"))
        assert len(some) == 4 and some[-1]["tokens"] == 512
        assert len(every) == 8 and [row["epoch"] for row in every[3:5]] == [32 / 39, 40 / 39]
        assert "\nsteps = 8\n" in Path("all/deck.toml").read_text()
        assert "\n# steps = 4  # " in Path("some/deck.toml").read_text()
        rows = list(read_metrics(Path("mixed/metrics.jsonl")))
        assert len(rows) == 5 and rows[-1]["epoch"] == 40 / 78
        assert rows[-1]["epochs"] == {"a": 25 / 36, "others": 15 / 42}
        assert "epochs of the mixture: a 0.69, others 0.36" in Path("mixed/log.txt").read_text()
    world.everyone.barrier()
