"""Runs that go on, or start from a model, with tokens that are not those of the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.checkpoint.exchange.convert import export_model
from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.train.replay import replay
from hpctrain.train.run import resume, run_deck
from tests.data.preparing import prepare

DECK = """
[run]
title = "first"
steps = 2
[model]
family = "gpt2"
layers = 1
hidden = 16
heads = 2
vocabulary = 300
[data]
tokens = "bytes.h5"
validation = 0.2
[batch]
global_size = 2
sequence = 16
[machine]
peak_flops = 1e10
"""


@pytest.fixture
def work(world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a deck, and token files of bytes, of other bytes, and of a BPE."""
    monkeypatch.chdir(mpi_tmp_path)
    if world.rank == 0:
        Path("a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
        Path("b.txt").write_text("a text of another kind, about nothing at all. " * 40)
        Path("deck.toml").write_text(DECK)
    world.everyone.barrier()
    prepare(world, Path("bytes.h5"), ["a.txt"])
    prepare(world, Path("others.h5"), ["b.txt"])
    prepare(world, Path("bpe.h5"), ["a.txt"], train_bpe=280)
    return mpi_tmp_path


def log(folder: str) -> str:
    return Path(folder, "log.txt").read_text()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_goes_on_with_its_own_tokenizer(world: World, work: Path) -> None:
    assert run_deck(world, Path("deck.toml"), []) == 0
    path = Path("runs/first/checkpoints/step-00000002.h5")
    state = read_state(path)
    assert state["tokenizer"] == "bytes" and state["corpus"]["tokens"] == 1801
    with pytest.raises(HpctrainError) as caught:
        resume(world, Path("runs/first"), ["data.tokens=bpe.h5", "run.steps=3"])
    [told] = caught.value.problems
    assert caught.value.exit_code == 2
    assert told.startswith(f"--set data.tokens=bpe.h5: its tokenizer differs from that of {path}: BPE of ")
    assert " instead of bytes of 257 tokens: 257 of the 257 common ids stand for different tokens" in told
    assert "data.other_tokenizer = true to allow this" in told
    # Other tokens of the same tokenizer are no mistake, but said.
    assert resume(world, Path("runs/first"), ["data.tokens=others.h5", "run.steps=3"]) == 0
    with pytest.raises(
        HpctrainError, match=r"others.h5: is not the token file that .* was trained on, so that"
    ):
        replay(world, path, None, ["data.tokens=others.h5"], None, lambda _: None)
    allowed = ["data.tokens=bpe.h5", "data.other_tokenizer=true", "run.steps=4"]
    assert resume(world, Path("runs/first"), allowed) == 0
    assert resume(world, Path("runs/first"), ["run.steps=5"]) == 0
    if world.rank == 0:
        said = log("runs/first")
        assert said.count("others.h5 is not the token file that") == 1
        assert (
            said.count("the tokenizer of bpe.h5 differs from that of runs/first/checkpoints/step-00000003.h5")
            == 1
        )
        assert said.count("bpe.h5 is not the token file that") == 1


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("kind", ["checkpoint", "folder"])
def test_a_run_starts_from_weights_of_its_tokenizer(world: World, work: Path, kind: str) -> None:
    assert run_deck(world, Path("deck.toml"), []) == 0
    source = "runs/first/checkpoints/step-00000002.h5"
    if kind == "folder":
        export_model(world, Path(source), Path("theirs"), None, 1 << 30)
        source = "theirs"
        content = json.loads(Path(source, "tokenizer.json").read_text())
        world.everyone.barrier()
        if world.rank == 0:
            Path(source, "tokenizer.json").write_text(json.dumps(content, indent=3, sort_keys=True))
        world.everyone.barrier()
    keys = [f"model.from={source}", "run.dir=second"]
    with pytest.raises(
        HpctrainError, match=rf"bpe.h5: its tokenizer differs from that of model.from = {source}: "
    ):
        run_deck(world, Path("deck.toml"), [*keys, "data.tokens=bpe.h5"])
    assert run_deck(world, Path("deck.toml"), [*keys, "data.tokens=others.h5"]) == 0
    assert "tokenizer" not in log("second")
    keys[1] = "run.dir=third"
    assert run_deck(world, Path("deck.toml"), [*keys, "data.tokens=bpe.h5", "data.other_tokenizer=true"]) == 0
    if world.rank == 0:
        assert f"the tokenizer of bpe.h5 differs from that of model.from = {source}: BPE of " in log("third")
        Path("theirs/tokenizer.json").unlink(missing_ok=True)
    world.everyone.barrier()
    if kind == "folder":
        assert run_deck(world, Path("deck.toml"), [*keys, "run.dir=fourth", "data.tokens=bpe.h5"]) == 0
        expected = (
            "the tokenizer of bpe.h5 cannot be compared with that of model.from = theirs: it has no "
            "tokenizer.json"
        )
        assert expected in log("fourth")
