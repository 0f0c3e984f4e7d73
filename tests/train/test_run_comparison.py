"""Runs that are compared: what is recorded of both, where they part, and which of them had a fault.

Tests of train/run_comparison.py, train/compared_run.py, train/common_start.py, train/verdict.py,
report/runs.py and checkpoint/file_fingerprints.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.checkpoint.exchange.source_fingerprint import source_fingerprint
from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.fault_checks.spikes import Spike
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train import compared_run
from hpctrain.train.corpus_comparison import SOURCE
from hpctrain.train.run import resume, run_deck
from hpctrain.train.run_comparison import compare
from hpctrain.train.trainer import Trainer
from tests.data.chats import write_rows
from tests.data.preparing import prepare_rows
from tests.post import policies
from tests.train.planted import flip, found
from tests.train.poisoned import BACK, Poison, make_deck, train
from tests.train.test_replay import files
from tests.train.test_run import write_deck
from tests.train.test_spike_response import AT, SHORT

Runs = Callable[..., Path]

KEYS = ("run.steps=8", "run.evaluate_every=0", "checkpoint.every=4", "checkpoint.keep=9")
UP = "blocks.1.feed_forward.up.weight"


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`runs("a", *keys)`: the folder of a run of eight steps, made once for all tests."""
    home: Path = world.communicator.bcast(tmp_path_factory.mktemp("compared"))
    deck = write_deck(world, home)

    def made(name: str, *keys: str) -> Path:
        folder = home / name
        if not world.communicator.bcast(folder.exists()):
            assert run_deck(world, deck, [f"run.dir={folder}", *KEYS, *keys]) == 0
        return folder

    return made


def compared(
    world: World, one: Path, other: Path, steps: int | None = None, replays: bool = True
) -> tuple[int, str]:
    """Exit code, and all that is shown, in one line; nothing is written."""
    shown: list[str] = []
    world.everyone.barrier()  # rank 0 may be the last one to end a run
    before = [files(each if each.is_dir() else each.parent) for each in (one, other)]
    code = compare(world, (one, other), steps, replays, shown.append)
    assert [files(each if each.is_dir() else each.parent) for each in (one, other)] == before
    assert bool(shown) == (world.rank == 0)
    told: tuple[int, str] = world.everyone.broadcast_object((code, " ".join(" ".join(shown).split())))
    return told


@pytest.mark.mpi(min_size=1, max_size=2)
def test_equal_runs_are_equal_bit_for_bit(world: World, runs: Runs) -> None:
    code, told = compared(world, runs("a"), runs("again"))
    assert code == 0
    assert "Recorded losses and gradient norms of 8 common steps are equal, bit for bit." in told
    assert "Replays 4 steps of both from step 4, where both are equal, bit for bit." in told
    assert "up to step 8, are equal, bit for bit, and equal to both records." in told
    last = runs("a") / "checkpoints/step-00000004.h5"
    code, told = compared(world, last, runs("again") / "checkpoints/step-00000004.h5", steps=2)
    assert code == 0 and "the 2 steps after step 4, up to step 6," in told


@pytest.mark.mpi(min_size=1, max_size=2)
def test_another_key_is_told_with_what_comes_of_it(world: World, runs: Runs) -> None:
    code, told = compared(world, runs("a"), runs("faster", "learning_rate.peak=1.01e-2"))
    assert code == 1
    assert "learning_rate.peak 0.01 0.0101" in told
    assert "The runs first differ in step 1, in the update: learning rate, by 9.9e-03" in told
    code, alone = compared(world, runs("a"), runs("faster"), replays=False)
    assert code == 1 and "Replays" not in alone and "step 2 is the first that differs" in alone


@pytest.mark.mpi(min_size=1, max_size=2)
def test_runs_that_went_on_from_one_checkpoint_are_replayed_from_there(world: World, runs: Runs) -> None:
    origin = runs("a") / "checkpoints/step-00000004.h5"
    folder = runs("a").parent / "branch"
    if world.rank == 0:
        (folder / "checkpoints").mkdir(parents=True)
        shutil.copy(origin, folder / "checkpoints")
    world.everyone.barrier()
    resume(world, folder / "checkpoints" / origin.name, ["optimizer.weight_decay=0.3"])
    code, told = compared(world, runs("a"), folder)
    assert code == 1
    assert "from step 4, where both are equal, bit for bit" in told
    assert "first differ in step 5, in the update: parameter embedding.tokens.weight" in told


@pytest.mark.mpi(min_size=1, max_size=1)
def test_a_model_that_runs_started_from_must_not_have_changed(world: World, runs: Runs) -> None:
    steps = [runs("a") / f"checkpoints/step-0000000{step}.h5" for step in (4, 8)]
    origin = runs("a").parent / "origin.h5"
    shutil.copy(steps[0], origin)
    keys = f"model.from={origin}", "run.steps=2"
    one, other = runs("tuned", *keys), runs("tuned-faster", *keys, "learning_rate.peak=1.01e-2")
    code, told = compared(world, one, other)
    assert code == 1 and "Replays 2 steps of both from their beginning" in told
    fingerprint = source_fingerprint(origin)
    shutil.copy(steps[1], origin)
    assert resume(world, one, ["run.steps=3"]) == 0
    assert (
        read_state(one / "checkpoints/step-00000003.h5")[SOURCE] == fingerprint != source_fingerprint(origin)
    )
    wanted = f'model.from = "{origin}", whose weights have changed since then'
    with pytest.raises(InputOutputError, match=f"tuned/checkpoints/.*: .*{wanted}") as caught:
        compared(world, one, other)
    assert f"expected {fingerprint}" in str(caught.value)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_layouts_differ_by_rounding(world: World, runs: Runs) -> None:
    code, told = compared(world, runs("a"), runs("tensor", "layout.tensor=2"))
    assert code == 0
    assert "Replays 4 steps of both from step 4, where both are equal up to rounding." in told
    assert "are equal up to rounding" in told
    code, told = compared(world, runs("tensor"), runs("zero", "layout.zero=3", "run.seed=2"))
    assert code == 1
    assert "The runs first differ in step 1, before the step: parameter embedding.tokens.weight" in told


@pytest.mark.mpi(max_size=1)
def test_layouts_of_other_ranks_are_replayed_on_those_there_are(world: World, runs: Runs) -> None:
    code, told = compared(world, runs("a"), runs("other kernels", "machine.products=onednn"))
    assert code == 0
    assert "machine.products" in told
    assert "Bits first differ in step" in told or "are equal, bit for bit" in told


def faulty(monkeypatch: pytest.MonkeyPatch, world: World, step: int) -> None:
    """Have a bit of a parameter turned over in memory before a step of the runs to come."""
    make = Trainer.train_step

    def made(trainer: Trainer, batch: int | None = None) -> object:
        here = found(trainer, UP)
        if trainer.state.step == step - 1 and world.rank == world.size - 1 and here is not None:
            flip(here[1].parameter.data.view(-1), 3, 24)
        return make(trainer, batch)

    monkeypatch.setattr(Trainer, "train_step", made)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_fault_of_one_run_is_told(world: World, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        faulty(patch, world, 7)
        other = runs("faulty")
    rows = [read_metrics(each / "metrics.jsonl") for each in (runs("a"), other)]
    assert [a["loss"] == b["loss"] for a, b in zip(*rows, strict=True)] == [True] * 6 + [False] * 2
    code, told = compared(world, runs("a"), other)
    assert code == 1
    assert "step 7 is the first that differs" in told
    assert "the second run recorded other values than its replay: its loss of step 7" in told
    assert "It had a fault that does not repeat, after the gradient reduction of step 6" in told
    assert "tensors of its checkpoint after step 8," in told
    code, swapped = compared(world, other, runs("a"))
    assert code == 1 and "the first run recorded other values" in swapped


@pytest.mark.mpi(max_size=1)
def test_what_cannot_be_compared_is_refused(world: World, runs: Runs, tmp_path: Path) -> None:
    def refused(one: Path, other: Path, what: str, replays: bool = True, code: int = 2) -> None:
        with pytest.raises(HpctrainError, match=what) as raised:
            compare(world, (one, other), None, replays, lambda _: None)
        assert raised.value.exit_code == code and len(raised.value.problems) == 1

    a = runs("a")
    refused(a, a.parent / "." / "a", "is given twice")
    refused(a, tmp_path, "is no run's folder and no checkpoint")
    refused(a, tmp_path / "none", "no such run folder or checkpoint", code=3)
    (tmp_path / "text").write_text("not a run")
    refused(a, tmp_path / "text", "is no run's folder and no checkpoint")
    refused(a, runs("deeper", "model.layers=3"), "have different models: blocks.2")
    torn = tmp_path / "torn"
    shutil.copytree(a, torn)
    newest = torn / "checkpoints/step-00000008.h5"
    newest.write_bytes(newest.read_bytes()[:3000])
    code, told = compared(world, a, torn)
    assert code == 0 and f"Skipped: {newest}" in told
    bare = tmp_path / "bare"
    shutil.copytree(a, bare)
    shutil.rmtree(bare / "checkpoints")
    refused(a, bare, "has no checkpoint, so that it cannot be replayed; compare records with `--no-replay`")
    assert compared(world, a, bare, replays=False)[0] == 0
    assert compared(world, a, runs("deeper"), replays=False)[0] == 1


@pytest.mark.mpi(max_size=1)
def test_a_replay_ends_where_its_run_went_back(
    world: World, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    spike = Spike(8, 9.0, 9.0, "far above", 0, 8, back_to=6)
    monkeypatch.setattr(compared_run, "recorded_spikes", lambda _: [spike])
    code, told = compared(world, runs("a"), runs("again"))
    assert code == 0 and "the 2 steps after step 4, up to step 6," in told
    assert f"The replay ends there, because {runs('a')} returned to step 6" in told


@pytest.mark.mpi(max_size=1)
def test_runs_that_went_back_to_their_beginning_are_replayed_from_its_checkpoint(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their first steps had other samples than follow from nothing, and no fault."""
    deck, keys = make_deck(world, mpi_tmp_path), (*BACK, *SHORT, "checkpoint.memory_every=60")
    one, other = mpi_tmp_path / "one", mpi_tmp_path / "other"
    with monkeypatch.context() as patch:
        Poison(patch, [AT], loud=True)
        for run in (one, other):
            _, rows = train(world, deck, run.name, *keys)
            assert [row["went_back"]["back_to"] for row in rows if "went_back" in row] == [0]
    code, told = compared(world, one, other, steps=3)
    assert code == 0 and "the 3 steps after their beginning, up to step 3, are equal, bit for bit" in told
    (other / "checkpoints" / "step-00000000.h5").unlink()
    with pytest.raises(HpctrainError, match="one: returned to its beginning and skipped samples"):
        compared(world, one, other)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_a_reference_made_of_samples_rounds_otherwise_on_another_layout(
    world: World, mpi_tmp_path: Path
) -> None:
    if world.rank == 0:
        rows = [
            {"prompt": f"{word}>", "chosen": word, "rejected": word[::-1]} for word in policies.words(200, 3)
        ]
        source = write_rows(mpi_tmp_path / "pairs.jsonl", rows)
        prepare_rows(
            world.single_rank_world(), mpi_tmp_path / "pairs.h5", [source], kind="preferences", template="raw"
        )
    world.everyone.barrier()
    for name, keys in (("one", []), ("other", ["layout.tensor=2"])):
        deck = policies.write_deck(world, mpi_tmp_path, name, 'kind = "dpo"\n', tokens="pairs", size=16)
        run_deck(world, deck, keys)
    code, told = compared(world, mpi_tmp_path / "one", mpi_tmp_path / "other")
    assert code == 0 and "are equal up to rounding, and equal to both records" in told
