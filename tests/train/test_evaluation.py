"""Evaluation on any layout against plain torch, and what follows from it: `best`, patience, after kills too.

Tests of train/best_evaluation.py, data/held_out.py, watch/evaluation_text.py, and `best` in
train/checkpoints.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.verify_checksums import verify
from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED, Batches
from hpctrain.data.held_out import HeldOut
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.deck.schema import Deck
from hpctrain.model.part import logits_of
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train import checkpoints, run_hooks
from hpctrain.train.best_evaluation import BestSoFar
from hpctrain.train.run import resume, run_deck
from hpctrain.watch.statuses import read_status, statuses_text
from tests.data.preparing import prepare
from tests.engines import by_rank_0, reference, small_deck, trainer

SEQUENCES = 7  # odd, and less than a micro-batch for every rank


def held_out(deck: Deck) -> Batches:
    source = SyntheticSource(deck.batch.sequence, deck.model.vocabulary or 0, seed=5, masked=0.2)
    return Batches(source, 1)


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize(
    "layout",
    [
        ("layout.tensor=2",),
        ("layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.pipeline=2",),
        ("layout.context=2",),
        ("layout.context=2", "layout.context_form=all_to_all"),
        ("layout.zero=3",),
        ("batch.micro_size=4",),
    ],
    ids=" ".join,
)
def test_every_layout_finds_the_loss_of_plain_torch(world: World, layout: tuple[str, ...]) -> None:
    deck = small_deck() if world.size == 1 else small_deck(*layout)
    found = trainer(world, deck).evaluate(held_out(deck), SEQUENCES)["loss"]

    def plain() -> float:
        model = reference(world, deck).engine.model
        total, count = 0.0, 0
        for index in range(SEQUENCES):
            tokens, targets = held_out(deck).source.sequence(index)  # type: ignore[attr-defined]
            with torch.no_grad():
                logits = logits_of(model, tokens.unsqueeze(0))[0].double()
            known = targets != MASKED
            total += float(torch.nn.functional.cross_entropy(logits[known], targets[known], reduction="sum"))
            count += int(known.sum())
        return total / count

    assert found == pytest.approx(by_rank_0(world, plain), abs=1e-6)


DECK = """
[run]
title = "small"
steps = 8
evaluate_every = 1
evaluate_sequences = 4
[model]
family = "llama"
layers = 1
hidden = 16
heads = 2
mlp = 16
[data]
tokens = "{folder}/a.h5"
validation = 0.2
[[evaluation]]
name = "other"
tokens = "{folder}/b.h5"
sequences = 3
[batch]
global_size = 4
sequence = 32
[learning_rate]
peak = 1e-2
warmup = 0
[checkpoint]
every = 3
keep = 1
[machine]
peak_flops = 1e10
"""


def write_deck(world: World, folder: Path) -> Path:
    if world.rank == 0:
        (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
        (folder / "b.txt").write_text("LOREM IPSUM DOLOR SIT AMET, CONSECTETUR. " * 9)
        (folder / "deck.toml").write_text(DECK.format(folder=folder))
    world.everyone.barrier()
    for name in ("a", "b"):
        prepare(world, folder / f"{name}.h5", [str(folder / f"{name}.txt")])
    return folder / "deck.toml"


def scripted(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Have evaluations of a run find these losses by step, whatever the model."""
    after_step = run_hooks.Evaluation.after_step

    def instead(self: run_hooks.Evaluation, done: Any) -> None:
        loss = losses[done.state.step]
        self.sets = [HeldOut("validation", self.sets[0].batches, 1)]
        self.trainer.evaluate = lambda *_: {"loss": loss}  # type: ignore[method-assign]
        after_step(self, done)

    monkeypatch.setattr(run_hooks.Evaluation, "after_step", instead)


def best_of(folder: Path) -> str:
    """The name of what `best` leads to, which is whole."""
    link = folder / "checkpoints" / "best"
    assert link.is_symlink()
    read_state(link)
    return link.readlink().name


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_tells_of_its_sets(world: World, mpi_tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = mpi_tmp_path / "run"
    keys = ("run.steps=4", "run.evaluate_every=2", "checkpoint.every=0")
    assert run_deck(world, write_deck(world, mpi_tmp_path), [f"run.dir={folder}", *keys]) == 0
    if world.rank:
        return
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "evaluation/other" in row] == [2, 4]
    last = rows[-1]
    assert last["validation_perplexity"] == pytest.approx(math.exp(last["validation_loss"]))
    assert last["evaluation/other/perplexity"] == pytest.approx(math.exp(last["evaluation/other"]))
    # Within the documents every token is a byte.
    assert last["evaluation/other/bits_per_byte"] == pytest.approx(last["evaluation/other"] / math.log(2))
    assert last["evaluation/other"] > last["validation_loss"]
    status = read_status(folder)
    assert status["evaluated"]["step"] == 4
    assert status["evaluated"]["sets"]["other"]["loss"] == last["evaluation/other"]
    assert f"after step 4 validation loss {last['validation_loss']:.4f}" in statuses_text([status])
    line = f"step 4/4  other loss {last['evaluation/other']:.4f}  perplexity "
    assert line in (folder / "log.txt").read_text()
    assert line in capfd.readouterr().out


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("mode", ["collective", "background"])
def test_the_best_stays_beside_the_newest(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    losses = {1: 5.0, 2: 4.0, 3: 4.5, 4: math.nan, 5: 4.0, 6: 4.2, 7: 3.0, 8: 9.0}
    scripted(monkeypatch, losses)
    folder, deck = mpi_tmp_path / "run", write_deck(world, mpi_tmp_path)
    keys = [f"run.dir={folder}", "checkpoint.keep_best=validation", f"checkpoint.mode={mode}"]
    assert run_deck(world, deck, [*keys, "run.steps=6", "learning_rate.decay=constant"]) == 0
    if world.rank == 0:
        assert best_of(folder) == "step-00000002.h5"
        assert names_in(folder) == ["best", "latest", "step-00000002.h5", "step-00000006.h5"]
    world.everyone.barrier()
    assert resume(world, folder, ["run.steps=8"]) == 0
    if world.rank == 0:
        assert best_of(folder) == "step-00000007.h5"
        assert names_in(folder) == ["best", "latest", "step-00000007.h5", "step-00000008.h5"]
        assert read_status(folder)["best"] == {"of": "validation", "step": 7, "loss": 3.0}


@pytest.mark.mpi(min_size=2, max_size=2)
def test_servers_keep_the_best_too(world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {1: 5.0, 2: 4.0, 3: 3.9, 4: 4.1, 5: 3.0, 6: 3.5, 7: 3.4, 8: 3.3})
    folder, deck = mpi_tmp_path / "run", write_deck(world, mpi_tmp_path)
    keys = [f"run.dir={folder}", "checkpoint.keep_best=validation", "learning_rate.decay=constant"]
    keys += ["communication.server.mode=sync", "communication.server.ranks=1", "batch.micro_size=2"]
    assert run_deck(world, deck, [*keys, "run.steps=4"]) == 0
    if world.rank == 0:
        assert best_of(folder) == "step-00000003.h5"
    world.everyone.barrier()
    assert resume(world, folder, ["run.steps=8", "run.patience=2"]) == 0
    if world.rank == 0:
        assert best_of(folder) == "step-00000005.h5"
        assert len(read_metrics(folder / "metrics.jsonl")) == 7
        assert "evaluation/other" not in read_metrics(folder / "metrics.jsonl")[-1]


@pytest.mark.mpi(min_size=1, max_size=1)
def test_a_run_that_goes_on_finds_the_best_or_makes_another(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, {1: 5.0, 2: 4.0, 3: 4.5, 4: 4.4, 5: 4.3, 6: 4.2, 7: 4.1, 8: 4.05})
    folder, deck = mpi_tmp_path / "run", write_deck(world, mpi_tmp_path)
    keys = [f"run.dir={folder}", "checkpoint.keep_best=validation", "learning_rate.decay=constant"]
    assert run_deck(world, deck, [*keys, "run.steps=3"]) == 0
    # Killed between the checkpoint and its link.
    (folder / "checkpoints" / "best").unlink()
    assert resume(world, folder, ["run.steps=4"]) == 0
    assert best_of(folder) == "step-00000002.h5"
    # Another model of that name is none of an evaluation that this run knows.
    (folder / "checkpoints" / "step-00000004.h5").replace(folder / "checkpoints" / "step-00000002.h5")
    (folder / "checkpoints" / "step-00000003.h5").unlink(missing_ok=True)
    assert resume(world, folder, ["run.steps=5"]) == 0
    assert best_of(folder) == "step-00000005.h5"
    assert "step-00000002.h5: the best checkpoint is missing" in (folder / "log.txt").read_text()
    assert resume(world, folder, ["run.steps=8", "checkpoint.keep_best="]) == 0
    assert best_of(folder) == "step-00000005.h5"  # what was kept stays


@pytest.mark.mpi(min_size=1, max_size=1)
def test_wherever_a_run_is_killed_best_is_whole_and_the_best(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {1: 5.0, 2: 4.0, 3: 3.0, 4: 3.5, 5: 2.0, 6: 4.2, 7: 4.1, 8: 4.05}
    scripted(monkeypatch, losses)
    deck = write_deck(world, mpi_tmp_path)

    class KilledError(Exception):
        pass

    def killing(original: Callable[..., Any], at: int, before: bool) -> Callable[..., Any]:
        calls = [0]

        def instead(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if before and calls[0] == at:
                raise KilledError
            result = original(*given, **named)
            if calls[0] == at:
                raise KilledError
            return result

        return instead

    # Links are made by twos where a checkpoint is the best so far: `latest`, then `best`.
    for name, at in (
        ("save", 1),
        ("save", 3),
        ("save", 5),
        ("try_point_to", 6),
        ("try_point_to", 9),
        ("keep", 5),
    ):
        for before in (True, False):
            folder = mpi_tmp_path / f"{name}-{at}-{before}"
            keys = [f"run.dir={folder}", "checkpoint.keep_best=validation", "checkpoint.every=2"]
            with monkeypatch.context() as within:
                within.setattr(checkpoints, name, killing(getattr(checkpoints, name), at, before))
                with pytest.raises(KilledError):
                    run_deck(world, deck, keys)
            link, step = folder / "checkpoints" / "best", len(read_metrics(folder / "metrics.jsonl"))
            lowest = min(range(1, step + 1), key=losses.__getitem__)
            if step > 1:
                verify(link, world.everyone)
                assert int(link.readlink().name[5:13]) in {lowest, lowest - 1, lowest - 2}
            assert run_deck(world, deck, keys, resumes=True) == 0
            assert best_of(folder) == "step-00000005.h5", (name, at, before)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_patience_ends_a_run_in_good_order(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, {1: 5.0, 2: 4.0, 3: 4.5, 4: 4.4, 5: 4.3, 6: 4.2, 7: 3.9, 8: 3.9})
    folder, deck = mpi_tmp_path / "run", write_deck(world, mpi_tmp_path)
    keys = [f"run.dir={folder}", "run.patience=3", "learning_rate.decay=constant", "checkpoint.every=0"]
    assert run_deck(world, deck, [*keys, "run.steps=3"]) == 0  # one evaluation without a lower loss
    assert resume(world, folder, ["run.steps=8"]) == 0
    why = "3 evaluations without a lower validation loss; lowest 4.0000 after step 2 (run.patience = 3)"
    if world.rank == 0:
        assert (
            f"ended after step 5 of 8: {why}; continue with a higher run.patience, or 0"
            in capfd.readouterr().out
        )
        status = json.loads((folder / "status.json").read_text())
        assert (status["state"], status["reason"], status["step"]) == ("done", why, 5)
        assert (folder / "checkpoints" / "latest").readlink().name == "step-00000005.h5"
    world.everyone.barrier()
    assert resume(world, folder, []) == 0
    if world.rank == 0:
        assert len(read_metrics(folder / "metrics.jsonl")) == 5
        assert "ended after step 5 of 8" in capfd.readouterr().out
    world.everyone.barrier()
    assert resume(world, folder, ["run.patience=0"]) == 0
    if world.rank == 0:
        assert len(read_metrics(folder / "metrics.jsonl")) == 8


def test_what_is_remembered_of_evaluations() -> None:
    deck = small_deck("checkpoint.keep_best=validation", "run.evaluate_every=1", "run.patience=2")
    best = BestSoFar(deck)
    for step, loss in enumerate((math.nan, 3.0, 2.0, 2.0), start=1):
        best.add_evaluation(step, {"validation": {"loss": loss}})
    assert (best.step, best.loss, best.waited, best.checkpoint_step) == (3, 2.0, 1, 3)
    assert best.is_best_checkpoint(3)
    assert not best.is_best_checkpoint(4)
    assert not best.reason_to_stop
    other = BestSoFar(deck)
    other.resume(json.loads(json.dumps(best.stored())))
    assert vars(other) == vars(best)
    other.forget_checkpoint()
    other.add_evaluation(5, {"validation": {"loss": 2.5}})
    assert (other.step, other.checkpoint_step, other.checkpoint_loss) == (3, 5, 2.5)
    assert other.reason_to_stop == (
        "2 evaluations without a lower validation loss; lowest 2.0000 after step 3 (run.patience = 2)"
    )
    without = BestSoFar(small_deck("run.patience=2", "run.evaluate_every=1"))
    without.resume({**best.stored(), "of": without.set_name, "keeps": True})
    assert (without.step, without.loss, without.checkpoint_step, without.keeps) == (3, 2.0, 0, False)
    without.resume({**best.stored(), "loss": "low"})
    assert without.step == 0
    anew = BestSoFar(small_deck("run.evaluate_every=1"))
    anew.resume({**best.stored(), "of": "books"})
    assert vars(anew) == vars(BestSoFar(small_deck("run.evaluate_every=1")))
