"""Whole runs: their folder, their figures, and going on from a checkpoint.

Tests of train/run.py, train/run_construction.py, train/training_loop.py, train/checkpoints.py,
train/run_hooks.py and watch/reporter.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import resume, run_deck
from hpctrain.watch.checkpoint_target import find_checkpoint
from tests.data.preparing import prepare

DECK = """
[run]
title = "small"
steps = 20
log_every = 5
evaluate_every = 10
evaluate_sequences = 16
[model]
family = "gpt2"
layers = 2
hidden = 32
heads = 4
dropout = 0.1
[data]
tokens = "{tokens}"
validation = 0.2
[batch]
global_size = 8
micro_size = 2
sequence = 32
ramp_from = 4
ramp_steps = 6
[learning_rate]
peak = 1e-2
warmup = 2
decay_steps = 20
[communication]
bucket_bytes = "20 kB"
[checkpoint]
every = 10
[machine]
peak_flops = 1e10
"""


@pytest.fixture
def deck_file(world: World, mpi_tmp_path: Path) -> Path:
    """A deck on disk with its token file; of a batch of four sequences, four ranks take one each."""
    return write_deck(world, mpi_tmp_path)


def write_deck(world: World, folder: Path) -> Path:
    """The same, made in a folder that all ranks share. Collective."""
    path = folder / "small.toml"
    if world.rank == 0:
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
        text = DECK.format(tokens=folder / "tokens.h5")
        path.write_text(text if world.size <= 2 else text.replace("micro_size = 2", "micro_size = 1"))
    world.everyone.barrier()
    prepare(world, folder / "tokens.h5", [str(folder / "text.txt")])
    return path


@pytest.fixture(scope="module")
def course(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], list[float]]:
    """`course(deck_file, "bf16")`: losses of the deck's 20 steps on data ranks, run once for all tests."""
    known: dict[str, list[float]] = {}

    def losses(deck_file: Path, compute: str) -> list[float]:
        if compute not in known:
            folder = world.communicator.bcast(tmp_path_factory.mktemp("course"))
            run_deck(world, deck_file, [f"run.dir={folder}", f"precision.compute={compute}"])
            known[compute] = [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]
        return known[compute]

    return losses


def contents(path: Path) -> dict[str, np.ndarray]:
    """Every dataset of a checkpoint but the texts that name the run's folder."""
    found: dict[str, np.ndarray] = {}
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: (
                found.update({name: item[()]})
                if isinstance(item, h5py.Dataset) and name.startswith(("model", "master", "optimizer"))
                else None
            )
        )
    return found


@pytest.mark.mpi(max_size=2)
def test_seconds_of_a_link_that_is_not_there_are_marked(
    world: World, deck_file: Path, mpi_tmp_path: Path
) -> None:
    folder, link = mpi_tmp_path / "run", "1 Gbit/s, 10 us"
    keys = ["run.steps=2", "run.evaluate_every=0", "checkpoint.every=0", f"communication.emulate={link}"]
    assert run_deck(world, deck_file, [f"run.dir={folder}", *keys]) == 0
    world.emulate_link(None)
    if world.rank == 0:
        rows = read_metrics(folder / "metrics.jsonl")
        assert [row["emulated_link"] for row in rows] == [link, link]
        assert all((row["payload_bytes"] > 0) == (world.size > 1) for row in rows)
        assert f"link {link}; times and tokens/s are" in (folder / "log.txt").read_text()


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_ten_steps_and_ten_more_are_twenty(
    world: World, deck_file: Path, mpi_tmp_path: Path, compute: str
) -> None:
    if world.size > 1 and compute != "fp16":
        pytest.skip("one rank has tried it; fp16 has all state that there is")
    precision = f"precision.compute={compute}"
    whole, parts = mpi_tmp_path / "whole", mpi_tmp_path / "parts"
    assert run_deck(world, deck_file, [precision, f"run.dir={whole}"]) == 0
    assert run_deck(world, deck_file, [precision, f"run.dir={parts}", "run.steps=10"]) == 0
    assert resume(world, parts, ["run.steps=20"]) == 0
    name = "checkpoints/step-00000020.h5"
    expected, found = contents(whole / name), contents(parts / name)
    assert expected.keys() == found.keys()
    assert any(key.startswith("master/") for key in found) == (compute != "fp32")
    for key, values in expected.items():
        assert values.tobytes() == found[key].tobytes(), key
    if world.rank == 0:
        rows = read_metrics(whole / "metrics.jsonl")
        assert [row["loss"] for row in rows] == [row["loss"] for row in read_metrics(parts / "metrics.jsonl")]
        assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("layout.tensor=2",), ()),
        ((), ("layout.tensor=2", "layout.sequence_parallel=true")),
        (("layout.context=2",), ("layout.pipeline=2",)),
        (("layout.pipeline=2",), ("layout.tensor=2",)),
        (("layout.zero=3", "precision.compute=bf16"), ("layout.pipeline=2", "precision.compute=bf16")),
        (("layout.context=2",), ("layout.zero=2",)),
    ],
    ids=str,
)
def test_a_run_goes_on_on_another_layout(
    world: World,
    deck_file: Path,
    mpi_tmp_path: Path,
    course: Callable[[Path, str], list[float]],
    before: tuple[str, ...],
    after: tuple[str, ...],
) -> None:
    """Losses are those of one layout to rounding: parameters, moments and the order of samples carry over."""
    expected = course(deck_file, "bf16" if "precision.compute=bf16" in before else "fp32")
    parts = mpi_tmp_path / "parts"
    run_deck(world, deck_file, [f"run.dir={parts}", "run.steps=10", *before])
    undo = [f"{change.partition('=')[0]}=" for change in before]
    resume(world, parts, ["run.steps=20", *undo, *after])
    if world.rank == 0:
        found = [row["loss"] for row in read_metrics(parts / "metrics.jsonl")]
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_run_goes_on_in_another_stage_of_zero_bit_for_bit(
    world: World, deck_file: Path, mpi_tmp_path: Path
) -> None:
    precision = "precision.compute=bf16"
    whole, parts = mpi_tmp_path / "whole", mpi_tmp_path / "parts"
    run_deck(world, deck_file, [f"run.dir={whole}", precision])
    run_deck(world, deck_file, [f"run.dir={parts}", precision, "run.steps=5", "layout.zero=3"])
    for steps, stage in ((10, 1), (15, 0), (20, 2)):
        resume(world, parts, [f"run.steps={steps}", f"layout.zero={stage}"])
    name = "checkpoints/step-00000020.h5"
    expected, found = contents(whole / name), contents(parts / name)
    for key, values in expected.items():
        assert values.tobytes() == found[key].tobytes(), key


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_a_run_leaves_behind(world: World, deck_file: Path, mpi_tmp_path: Path) -> None:
    folder = mpi_tmp_path / "run"
    run_deck(world, deck_file, [f"run.dir={folder}", "checkpoint.every=5"])
    if world.rank > 0:
        return
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 21))
    expected = {
        "step",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "seconds",
        "tokens_per_s",
        "mfu",
        "peak_rss_bytes",
    }
    assert expected <= rows[0].keys()
    batches = [row["batch"] for row in rows]
    assert batches[0] == 4
    assert batches[6:] == [8] * 14
    assert batches == sorted(batches)
    assert rows[-1]["tokens"] == 32 * sum(batches)
    assert [row["step"] for row in rows if "validation_loss" in row] == [10, 20]
    assert rows[0]["lr"] == pytest.approx(5e-3)
    resolved = parse_deck((folder / "deck.toml").read_text())
    assert resolved.model.vocabulary == 257
    assert resolved.run.dir == str(folder)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["latest", "step-00000015.h5", "step-00000020.h5"]
    ledger = json.loads((folder / "ledger.json").read_text())
    assert "checkpoint " in (folder / "log.txt").read_text()
    assert not list(folder.glob("log.[0-9]*.txt"))
    if world.size > 1:
        # 2 Phi elements a step in an all-reduce, fp32, with the buckets' padding.
        moved = sum(
            row["bytes"] for row in ledger if row["axis"] == "data x context" and row["phase"] == "backward"
        )
        with h5py.File(folder / "checkpoints" / "step-00000020.h5", "r") as file:
            elements = sum(
                values.size
                for key, values in contents(Path(file.filename)).items()
                if key.startswith("model/")
            )
        padding = 64 * world.size * 20
        assert 20 * 8 * elements <= moved <= 20 * 8 * (elements + padding)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_folder_with_another_run_is_refused(world: World, deck_file: Path, mpi_tmp_path: Path) -> None:
    overrides = [f"run.dir={mpi_tmp_path / 'run'}", "run.steps=8"]
    run_deck(world, deck_file, overrides)
    with pytest.raises(HpctrainError, match="holds another run already"):
        run_deck(world, deck_file, overrides)
    assert run_deck(world, deck_file, overrides, fresh=True) == 0


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_longer_run_takes_the_learning_rate_of_one_that_was_meant_to_be_so_long(
    world: World, deck_file: Path, mpi_tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ["checkpoint.every=0", "run.evaluate_every=0", "learning_rate.warmup="]

    def rates(name: str, *changes: str) -> list[float]:
        """Of the steps 1 to 12 of a run that was begun with 6."""
        folder = mpi_tmp_path / name
        run_deck(world, deck_file, [f"run.dir={folder}", "run.steps=6", *keys, *changes])
        resume(world, folder, ["run.steps=12"])
        world.everyone.barrier()
        return [row["lr"] for row in read_metrics(folder / "metrics.jsonl")]

    whole = mpi_tmp_path / "whole"
    run_deck(world, deck_file, [f"run.dir={whole}", "run.steps=12", *keys, "learning_rate.decay_steps="])
    expected = [row["lr"] for row in read_metrics(whole / "metrics.jsonl")]
    assert rates("defaulted", "learning_rate.decay_steps=")[6:] == expected[6:]
    assert "the decay has ended" not in capfd.readouterr().err
    assert rates("given", "learning_rate.decay_steps=6")[6:] == pytest.approx([1e-3] * 6)
    told = "step-00000006.h5, its deck:"
    end = "the decay has ended: steps 7 to 12 train at its floor, 0.1 of the peak"
    warned = [line for line in capfd.readouterr().err.splitlines() if told in line and end in line]
    assert len(warned) == (world.rank == 0)


@pytest.mark.mpi(max_size=1)
def test_the_bar_stays_above_what_is_told_at_the_end(
    world: World,
    deck_file: Path,
    mpi_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HPCTRAIN_PROGRESS", "bar")
    run_deck(world, deck_file, [f"run.dir={mpi_tmp_path / 'run'}", "run.steps=3"])
    shown = capfd.readouterr().out
    assert "\x1b[K" not in shown[shown.index("metrics     ") :]
    (last,) = [line for line in shown.split("\n") if line.endswith("\x1b[K") and "\r" in line][-1:]
    assert "step 3/3" in last.split("\r")[-1]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("split", ["layout.tensor=2", "layout.pipeline=2", "layout.zero=3"])
def test_what_evaluation_moves_has_a_phase_of_its_own(
    split: str, world: World, deck_file: Path, mpi_tmp_path: Path
) -> None:
    def moved(name: str, *keys: str) -> dict[tuple[str, str, str], tuple[int, int]]:
        folder = mpi_tmp_path / name
        steps = ["run.steps=2", "checkpoint.every=0", *keys]
        run_deck(world, deck_file, [f"run.dir={folder}", split, *steps])
        world.everyone.barrier()
        rows = json.loads((folder / "ledger.json").read_text())
        return {(row["axis"], row["operation"], row["phase"]): (row["calls"], row["bytes"]) for row in rows}

    alone = moved("alone", "data.validation=0.0", "run.evaluate_every=0")
    both = moved("both", "run.evaluate_every=1")
    assert not any(phase == "evaluation" for _, _, phase in alone)
    assert any(size for (_, _, phase), (_, size) in both.items() if phase == "evaluation")
    for key in both:
        if key[2] in {"forward", "backward", "synchronize", "step"}:
            assert both[key] == alone[key], key


@pytest.mark.mpi(min_size=1)
def test_resume_names_what_is_missing(world: World, deck_file: Path, mpi_tmp_path: Path) -> None:
    with pytest.raises(InputOutputError, match="no such run folder or checkpoint"):
        find_checkpoint(world, mpi_tmp_path / "nothing")
    with pytest.raises(HpctrainError, match=r"small\.toml: is a deck; name a checkpoint"):
        find_checkpoint(world, deck_file)
    with pytest.raises(InputOutputError, match="holds no valid checkpoint"):
        find_checkpoint(world, mpi_tmp_path)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_resume_passes_over_a_damaged_checkpoint(
    world: World, deck_file: Path, mpi_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = mpi_tmp_path / "run"
    run_deck(world, deck_file, [f"run.dir={folder}"])
    newest = folder / "checkpoints" / "step-00000020.h5"
    if world.rank == 0:
        with h5py.File(newest, "r") as file:
            place = file["optimizer/exp_avg/blocks.1.feed_forward.up.weight"].id.get_offset()
        content = bytearray(newest.read_bytes())
        content[place + 1000] ^= 1
        newest.write_bytes(content)
    world.everyone.barrier()
    assert find_checkpoint(world, folder).name == "step-00000010.h5"
    with pytest.raises(InputOutputError, match=r"step-00000020\.h5: /optimizer/exp_avg/.* is damaged"):
        find_checkpoint(world, folder, strict=True)
    with pytest.raises(InputOutputError, match=r"step-00000020\.h5"):
        resume(world, newest, [])


@pytest.mark.mpi(min_size=1, max_size=2)
def test_background_checkpoints_are_those_of_the_collective_mode(
    world: World, deck_file: Path, mpi_tmp_path: Path
) -> None:
    """With a buffer too small for the state; every fifth step stays, of the others the newest."""
    keys = ["checkpoint.every=3", "checkpoint.keep=1", "checkpoint.keep_every=6", "checkpoint.buffer=20000"]
    for mode in ("collective", "background"):
        changes = [f"run.dir={mpi_tmp_path / mode}", f"checkpoint.mode={mode}", *keys]
        run_deck(world, deck_file, changes)
    world.everyone.barrier()
    folders = [mpi_tmp_path / mode / "checkpoints" for mode in ("collective", "background")]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    kept = ["latest", *(f"step-{step:08d}.h5" for step in (6, 12, 18, 20))]
    assert names == [kept, kept]
    for folder in folders:
        assert (folder / "latest").readlink() == Path("step-00000020.h5")
    for name in kept:
        one, other = (contents(folder / name) for folder in folders)
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16")])
def test_runs_of_another_precision_go_on(
    before: str, after: str, world: World, deck_file: Path, mpi_tmp_path: Path
) -> None:
    """Master weights and moments are the same numbers; parameters of half precision are these, rounded."""
    run_deck(
        world,
        deck_file,
        [f"run.dir={mpi_tmp_path / 'one'}", f"precision.compute={before}", "run.steps=10"],
    )
    first = mpi_tmp_path / "one" / "checkpoints" / "step-00000010.h5"
    keys = [f"precision.compute={after}", "optimizer.weight_decay=0.0", "learning_rate.peak=1e-30"]
    resume(world, first, [f"run.dir={mpi_tmp_path / 'two'}", "run.steps=11", *keys])
    old, new = contents(first), contents(mpi_tmp_path / "two" / "checkpoints" / "step-00000011.h5")
    for name in (name for name in old if name.startswith("model/")):
        master = name.replace("model/", "master/")
        expected, found = old.get(master, old[name]), new.get(master, new[name])
        assert np.array_equal(expected, found), name
        if after == "fp16":
            assert np.array_equal(new[name], expected.astype(np.float16)), name
    losses = [
        row["loss"] for run in ("one", "two") for row in read_metrics(mpi_tmp_path / run / "metrics.jsonl")
    ]
    assert losses[10] == pytest.approx(losses[9], rel=0.2)
