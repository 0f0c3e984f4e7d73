"""Samples that were left out for spikes are those that the steps had read, whatever files they come from.

Tests of report/bad_samples.py, and of where data/data_mixture.py says that samples come from.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.data.tokens import TokenFile
from hpctrain.errors import HpctrainError
from hpctrain.report.inspect import InspectOptions, inspect
from hpctrain.train.run import run_deck
from hpctrain.train.step import ReadBatches, Step, TrainState
from tests.data.preparing import prepare
from tests.train.poisoned import Poison

BATCH = 8
DECK = """
[run]
title = "mixed"
steps = 18
evaluate_every = 0
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
micro_size = 2
sequence = 16
[learning_rate]
warmup = 2
[stability]
spike = "skip"
spike_window = 8
spike_factor = 30.0
[checkpoint]
every = 0
[machine]
peak_flops = 1e10
"""
SHARDS = ("data.mixture=", 'data.tokens=["b.h5", "c.h5"]')


@pytest.fixture
def work(world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with token files of lines that all differ, in which ranks work."""
    monkeypatch.chdir(mpi_tmp_path)
    if world.rank == 0:
        Path("deck.toml").write_text(DECK)
        for name in "abc":
            Path(f"{name}.txt").write_text("".join(f"{name}{n:04}\n" for n in range(300)))
    world.everyone.barrier()
    for name in "abc":
        prepare(world, Path(f"{name}.h5"), [f"{name}.txt"])
    return mpi_tmp_path


def left_out(world: World, patch: pytest.MonkeyPatch, *keys: str) -> list[list[int]]:
    """A run of which the twelfth step is left out; the sequences that it had read, of all ranks."""
    seen: list[list[int]] = []
    read = Step.read_share

    def kept(step: Step, state: TrainState, batch: int) -> ReadBatches:
        share = read(step, state, batch)
        if state.step == 11:
            seen.extend(
                row.tolist() for micro in share.micro_batches for row in micro.tokens[: micro.samples]
            )
        return share

    with patch.context() as patched:
        patched.setattr(Step, "read_share", kept)
        Poison(patched, [11 * BATCH], rank=0, tokens=False, loud=True)
        assert run_deck(world, Path("deck.toml"), ["run.dir=run", *keys]) == 0
    return [row for rows in world.everyone.all_gather_object(seen) for row in rows]


def inspected(world: World, *, as_json: bool) -> str:
    shown: list[str] = []
    inspect(world.everyone, Path("run"), InspectOptions(bad_samples=True, as_json=as_json), shown.append)
    return "\n".join(shown)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("keys", [(), SHARDS], ids=["mixture", "shards"])
def test_files_and_texts_are_those_of_the_samples_that_were_read(
    world: World, work: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    sequences = left_out(world, monkeypatch, *keys)
    told_as_json, told = inspected(world, as_json=True), inspected(world, as_json=False)
    if world.rank:
        return
    (spike,) = json.loads(told_as_json)["spikes"]
    assert (spike["step"], spike["samples"]) == (12, BATCH)
    tokenizer = TokenFile("a.h5").tokenizer
    texts = [tokenizer.decode(each) for each in sequences]
    rows = spike["left_out"]
    assert sorted(row["text"] for row in rows) == sorted(texts)
    files = {row["file"] for row in rows}
    assert files == ({"b.h5", "c.h5"} if keys else {"a.h5", "b.h5", "c.h5"})
    first = {"a.h5": 0, "b.h5": 0, "c.h5": TokenFile("b.h5").tokens}
    for row in rows:
        assert {"a.h5": "a", "b.h5": "others", "c.h5": "others"}[row["file"]] == row.get("entry", "others")
        assert ("entry" in row) != bool(keys)
        begin = row["index"] * 16 - first[row["file"]]
        known = TokenFile(row["file"]).read(begin, min(16, TokenFile(row["file"]).tokens - begin))
        assert row["text"].startswith(tokenizer.decode(known.tolist()))
    lines = told.splitlines()
    assert lines[0].split() == ["sample", "index", "file", "and", "text"]
    assert [line.split()[2] for line in lines[2:]] == [row["file"] for row in rows]


@pytest.mark.mpi(max_size=1)
def test_other_tokens_of_these_names_are_told(
    world: World, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out(world, monkeypatch)
    shutil.copy("b.h5", "c.h5")
    with pytest.raises(HpctrainError, match=r"^data\.mixture: the token files have changed since run/"):
        inspected(world, as_json=False)
