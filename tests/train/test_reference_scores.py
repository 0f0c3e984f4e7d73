"""Preferences are learned alike on every layout, beginning at ln 2; what was stored is what is read.

Tests of train/reference_scores.py and, through the run's own step, of objective/dpo.py.
What `hpctrain evaluate` finds of pairs is tested here, too.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED, Batches
from hpctrain.data.order import Integers, SampleOrder
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train import evaluate as evaluate_module
from hpctrain.train.reference_scores import copy_references, with_reference
from hpctrain.train.replay import open_replay
from hpctrain.train.run import resume, run_deck
from tests.data.chats import write_rows
from tests.data.preparing import prepare, prepare_rows
from tests.engines import LLAMA, Trainer, by_rank_0, small_deck, trainer

PAIRS = 12
DPO = (
    *("objective.kind=dpo", "objective.beta=0.5", "data.validation=0", "batch.global_size=8"),
    *("learning_rate.peak=1e-3", "run.evaluate_sequences=2"),
)
LAYOUTS = {
    "data": (),
    "zero": ("layout.zero=3",),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "ring": ("layout.context=2",),
    "exchanged": ("layout.context=2", "layout.context_form=all_to_all"),
    "adapters": ("layout.tensor=2", "model.adapters.rank=3"),
    "stages": ("layout.pipeline=2", "layout.schedule=zb-h1"),
}


class Pairs(SyntheticSource):
    """Answers of other lengths, one behind the other of which is preferred."""

    def sequence(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = super().sequence(index)
        targets = targets.clone()
        begin, end = 3 + index // 2 % 5, 12 + index % 7
        targets[:begin] = targets[end:] = MASKED
        return tokens, targets


class PairOrder(SampleOrder):
    """Pairs in an order, each with its rows in theirs."""

    def at(self, indices: Integers) -> Integers:
        return 2 * super().at(indices // 2) + indices % 2


def learner(world: World, deck: Deck, folder: Path, checkpoint: Path | None = None) -> Trainer:
    made = trainer(world, deck)
    source = Pairs(deck.batch.sequence, deck.model.vocabulary or 0, 2 * PAIRS)
    batches = Batches(source, 1, PairOrder(PAIRS, 1))
    made.step.batches = with_reference(made.step, batches, folder, "train", checkpoint)
    return made


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_learns_what_one_rank_does(world: World, tmp_path: Path, name: str) -> None:
    folder = world.everyone.broadcast_object(tmp_path)
    deck = small_deck(*LLAMA, *DPO, *LAYOUTS[name])
    made = learner(world, deck, folder / "all")
    steps = made.train(4)
    assert steps[0].loss == pytest.approx(math.log(2), abs=1e-7)
    assert steps[0].metrics["accuracy"] == 0.5
    assert steps[-1].loss < steps[0].loss - 1e-3

    def alone() -> list[tuple[float, float]]:
        one = learner(world.single_rank_world(), on_one_rank(deck), folder / "one")
        return [(step.loss, step.grad_norm) for step in one.train(4)]

    expected = by_rank_0(world, alone)
    assert [step.loss for step in steps] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [step.grad_norm for step in steps] == pytest.approx([norm for _, norm in expected], rel=1e-4)
    if world.rank == 0:
        own, other = (np.load(folder / each / "reference.train.npy")["values"] for each in ("all", "one"))
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)
        assert (own != 0).sum() == (other != 0).sum() > 3 * PAIRS


@pytest.mark.mpi(max_size=1)
def test_what_is_stored_is_read_again_or_refused(world: World, tmp_path: Path) -> None:
    deck = small_deck(*DPO)
    first = learner(world, deck, tmp_path).train(2)
    saved = tmp_path / "checkpoints" / "step-00000002.h5"  # of which only the folder is asked for
    moved = learner(world, deck, tmp_path)
    moved.train(3)
    path = tmp_path / "reference.train.npy"
    kept = path.read_bytes()
    moved.step.batches = with_reference(moved.step, moved.step.batches, tmp_path, "train", saved)
    assert path.read_bytes() == kept
    again = learner(world, deck, tmp_path, saved).train(2)
    assert [step.loss for step in again] == [step.loss for step in first]
    elsewhere = learner(world, deck, tmp_path / "other", saved).train(2)
    assert [step.loss for step in elsewhere] == [step.loss for step in first]
    (tmp_path / "third").mkdir()
    for _ in range(2):  # what is there already stays
        copy_references(world, tmp_path, tmp_path / "third")
    assert [each.name for each in (tmp_path / "third").iterdir()] == [path.name]
    assert (tmp_path / "third" / path.name).read_bytes() == kept
    damaged = bytearray(kept)
    damaged[-100] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(InputOutputError, match=r"reference.train.npy: is damaged \(row 23\)"):
        learner(world, deck, tmp_path, saved).train(3)
    path.write_bytes(kept[:-1])
    with pytest.raises(InputOutputError, match="is incomplete"):
        learner(world, deck, tmp_path, saved)
    path.unlink()
    with pytest.raises(InputOutputError, match="is missing"):
        learner(world, deck, tmp_path, saved)


def prepared_pairs(world: World, folder: Path) -> list[str]:
    """A file of a few preferences there, and the keys of a deck that trains two steps on it. Collective."""
    if world.rank == 0:
        rows = [{"prompt": f"{n}>", "chosen": str(n), "rejected": str(n + 1)} for n in range(8)]
        source = write_rows(folder / "pairs.jsonl", rows)
        prepare_rows(
            world.single_rank_world(), folder / "pairs.h5", [source], kind="preferences", template="raw"
        )
    world.everyone.barrier()
    of_data = (f"data.tokens={folder}/pairs.h5", "model.vocabulary=257", "run.steps=2")
    return [*DPO, *of_data, "checkpoint.every=1"]


@pytest.mark.mpi(max_size=2)
def test_the_reference_of_another_run_is_known(world: World, mpi_tmp_path: Path) -> None:
    """Of as many answers: a run that goes on is told, and goes on once it has its own again."""
    keys = prepared_pairs(world, mpi_tmp_path)
    folders = [mpi_tmp_path / name for name in ("one", "other")]
    for seed, folder in enumerate(folders):
        deck = small_deck(*keys, f"run.seed={seed}", f"run.dir={folder}")
        assert run_deck(world, deck, []) == 0
    own, foreign = (folder / "reference.train.npy" for folder in folders)
    kept, first = own.read_bytes(), folders[0] / "checkpoints/step-00000001.h5"
    for content, goes_on in ((foreign.read_bytes(), False), (kept, True)):
        world.everyone.barrier()
        if world.rank == 0:
            own.write_bytes(content)
        world.everyone.barrier()
        if goes_on:
            assert resume(world, first, []) == 0
            continue
        with pytest.raises(
            InputOutputError, match=f"{own}: belongs to another run than {first}, whose reference"
        ):
            resume(world, first, [])


@pytest.mark.mpi(max_size=2)
def test_a_replay_leaves_nothing(world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One from nothing computes its reference anew, in a folder of its own."""
    keys = prepared_pairs(world, mpi_tmp_path)
    elsewhere = mpi_tmp_path / "elsewhere"
    by_rank_0(world, elsewhere.mkdir)
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    with open_replay(world, small_deck(*keys, f"run.dir={mpi_tmp_path}/run"), None):
        (folder,) = elsewhere.iterdir()
        assert [path.name for path in folder.iterdir()] == ["reference.train.npy"]
        world.everyone.barrier()  # rank 0 removes the folder
    world.everyone.barrier()
    assert not list(elsewhere.iterdir())


def told(world: World, run: Path, files: list[Path], *overrides: str) -> Any:
    """Return what `hpctrain evaluate` tells of token files as JSON, on all ranks."""
    shown: list[str] = []
    data = evaluate_module.EvaluationData(files)
    evaluate_module.evaluate(world, run, data, overrides, True, shown.append, lambda _: None)
    return world.everyone.broadcast_object(json.loads(shown[0]) if shown else None)


@pytest.mark.mpi(max_size=2)
def test_evaluate_finds_what_the_run_found(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluate a run from its seed, and one that starts from the other's checkpoint."""
    pairs, folders = mpi_tmp_path / "pairs.h5", [mpi_tmp_path / name for name in ("first", "second")]
    keys = [*prepared_pairs(world, mpi_tmp_path), "checkpoint.every=0", "run.evaluate_every=2"]
    keys += ["layout.zero=1", f'evaluation=[{{name="pairs", tokens="{pairs}", sequences=16}}]']
    origin = folders[0] / "checkpoints/step-00000002.h5"
    later = f"model.from={origin}", "model.adapters.rank=3", "precision.compute=bf16"
    for folder, more, reference in zip(folders, ((), later), ("run.seed = 1234", str(origin)), strict=True):
        assert run_deck(world, small_deck(*keys, *more, f"run.dir={folder}"), []) == 0
        row = read_metrics(folder / "metrics.jsonl")[-1]
        evaluated = told(world, folder, [pairs])
        assert evaluated["reference"] == reference
        [figures] = evaluated["evaluations"]
        assert figures["sequences"] == 16
        assert figures["loss"] == row["evaluation/pairs"] != pytest.approx(math.log(2), abs=1e-4)
        for name in ("accuracy", "margin", "chosen", "rejected"):
            assert figures[name] == row[f"evaluation/pairs/{name}"], name

    monkeypatch.setattr(evaluate_module, "MICRO_BATCHES", 2)  # in parts, and in another layout
    layout = ("layout.tensor=2", "layout.zero=0") if world.size == 2 else ()
    whole = read_metrics(folders[0] / "metrics.jsonl")[-1]
    [parts] = told(world, folders[0], [pairs], *layout)["evaluations"]
    assert parts["loss"] == pytest.approx(whole["evaluation/pairs"], rel=1e-5)
    if world.rank == 0:
        (mpi_tmp_path / "text.txt").write_text("some text " * 20)
    world.everyone.barrier()
    text = mpi_tmp_path / "text.h5"
    prepare(world, text, [str(mpi_tmp_path / "text.txt")])
    assert told(world, folders[0], [text])["evaluations"][0]["predicted"] > 0
    with pytest.raises(HpctrainError, match=r"pairs.h5: holds preferences, whose loss cannot be compared"):
        told(world, folders[0], [text, pairs])
    changed = (
        f'model.from = "{origin}", whose weights have changed since then .fingerprint .* '
        "restore the original weights"
    )
    by_rank_0(world, lambda: shutil.copy(folders[1] / "checkpoints/step-00000002.h5", origin))
    world.everyone.barrier()
    with pytest.raises(InputOutputError, match=changed):
        told(world, folders[1], [pairs])
    by_rank_0(world, lambda: origin.rename(origin.with_suffix(".gone")))
    world.everyone.barrier()
    with pytest.raises(InputOutputError, match=f'model.from = "{origin}", which no longer exists'):
        told(world, folders[1], [pairs])
