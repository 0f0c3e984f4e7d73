"""Tests of runs that learn nothing: skipped steps, no learned tokens, and weights that are not finite."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from hpctrain.checkpoint.names import checkpoints
from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED
from hpctrain.errors import EXIT_USER, HpctrainError, InputOutputError
from hpctrain.generate.generation_model import load
from hpctrain.train.evaluate import EvaluationData, evaluate
from hpctrain.train.run import resume, run_deck
from hpctrain.train.step import Step, TrainState
from tests.data.preparing import prepare
from tests.engines import small_deck, trainer

DECK = """
[run]
title = "small"
steps = 12
dir = "{folder}/run"
[model]
family = "llama"
layers = 1
hidden = 16
heads = 2
[data]
tokens = "{folder}/tokens.h5"
[batch]
global_size = 2
sequence = 16
[checkpoint]
every = 4
[machine]
peak_flops = 1e10
[stability]
max_skipped_steps = 3
"""


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a token file."""
    made = tmp_path_factory.mktemp("updates")
    (made / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    prepare(world.single_rank_world(), made / "tokens.h5", [str(made / "text.txt")])
    return made


@pytest.fixture
def deck(folder: Path, tmp_path: Path) -> Path:
    """Deck of a run in a new folder, with the shared token file."""
    path = tmp_path / "deck.toml"
    text = DECK.replace("{folder}/run", f"{tmp_path}/run")
    path.write_text(text.format(folder=folder))
    return path


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Step, TrainState], float]], None]:
    """Function that sets a hook. The hook runs before each step and returns a factor for the gradients."""

    def change(function: Callable[[Step, TrainState], float]) -> None:
        accumulate = Step.accumulate

        def changed(self: Step, state: TrainState, batch: int) -> tuple[torch.Tensor, int]:
            factor = function(self, state)
            sums, tokens = accumulate(self, state, batch)
            for bucket in self.engine.stage.buckets:
                bucket.owned_gradients.mul_(factor)
            return sums, tokens

        monkeypatch.setattr(Step, "accumulate", changed)

    return change


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


def test_run_with_nan_gradients_ends(
    world: World, deck: Path, tmp_path: Path, before_step: Callable[..., None]
) -> None:
    """It ends after `max_skipped_steps` steps, with a checkpoint."""
    before_step(lambda _, state: math.nan if state.step >= 5 else 1.0)
    with pytest.raises(HpctrainError) as caught:
        run_deck(world.single_rank_world(), deck, [])
    (problem,) = caught.value.problems
    begin = (
        f"{tmp_path}/run: the last 3 steps made no update (stability.max_skipped_steps = 3); step 8: loss "
    )
    assert problem.startswith(begin) and problem.endswith("or gradient norm nan is not finite")
    assert caught.value.exit_code == EXIT_USER
    assert checkpoints(tmp_path / "run" / "checkpoints")[0].name == "step-00000008.h5"
    assert status(tmp_path / "run")["state"] == "failed"
    assert status(tmp_path / "run")["reason"] == problem
    assert status(tmp_path / "run")["last_update"] == 5
    # Steps of the next job count on: one more is too many.
    before_step(lambda *_: math.nan)
    with pytest.raises(HpctrainError, match=r"the last 4 steps made no update"):
        resume(world.single_rank_world(), tmp_path / "run", [])


def test_infinite_weight_is_named_and_not_loaded(
    world: World,
    folder: Path,
    deck: Path,
    tmp_path: Path,
    before_step: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    output: list[str] = []

    def spoil(step: Step, state: TrainState) -> float:
        if state.step == 5:
            (bucket, *_) = step.engine.stage.buckets
            bucket.owned_values[ord("t") * 16 + 7] = math.inf
        return 1.0

    before_step(spoil)
    with pytest.raises(HpctrainError) as caught:
        run_deck(world.single_rank_world(), deck, ["checkpoint.every=6"])
    assert caught.value.problems[0].endswith("; /model/embedding.tokens.weight is inf at [116, 7]")
    before_step(lambda *_: 1.0)
    with pytest.raises(InputOutputError) as caught:
        resume(world.single_rank_world(), tmp_path / "run", [])
    path = tmp_path / "run" / "checkpoints" / "step-00000006.h5"
    assert caught.value.problems == (
        f"{path}: /model/embedding.tokens.weight is inf at [116, 7]: weights must be finite numbers "
        "(resume from an earlier checkpoint with `hpctrain resume CHECKPOINT`, or start again)",
    )
    with pytest.raises(InputOutputError) as caught:
        run_deck(world.single_rank_world(), deck, [f"run.dir={tmp_path}/other", f"model.from={path}"])
    found = f"{path}: /model/embedding.tokens.weight is inf at [116, 7]: weights must be finite numbers"
    begin, _, remedy = caught.value.problems[0].partition(" (")
    assert (begin, remedy) == (found, "start from an earlier checkpoint, or from another model)")
    caplog.clear()
    load(path, device="cpu")  # it can still be looked at
    evaluate(
        world.single_rank_world(),
        path,
        EvaluationData([folder / "tokens.h5"], 2),
        [],
        True,
        output.append,
        print,
    )
    assert [record.message.partition(" (")[0] for record in caplog.records] == [found, found]
    assert json.loads(output[0])["evaluations"][0]["loss"] is None


def test_run_without_any_update_fails(world: World, deck: Path, tmp_path: Path) -> None:
    """The loss scale is still too large after the last step. A resume continues from the stored one."""
    keys = ["precision.compute=fp16", "precision.initial_loss_scale=16777216.0", "run.steps=2"]
    with pytest.raises(HpctrainError, match=r"none of its 2 steps made an update; step 2: loss 5\.\d+ or"):
        run_deck(world.single_rank_world(), deck, keys)
    assert resume(world.single_rank_world(), tmp_path / "run", ["run.steps=20"]) == 0


@pytest.mark.parametrize("max_skipped_steps", [0, 50])
def test_deck_may_allow_skipped_steps(
    world: World, deck: Path, before_step: Callable[..., None], max_skipped_steps: int
) -> None:
    before_step(lambda _, state: math.nan if state.step else 1.0)
    assert (
        run_deck(
            world.single_rank_world(),
            deck,
            [f"stability.max_skipped_steps={max_skipped_steps}", "run.steps=6"],
        )
        == 0
    )


def test_steps_that_lower_the_loss_scale_do_not_count(world: World) -> None:
    run = trainer(
        world.single_rank_world(),
        small_deck("precision.compute=fp16", "precision.initial_loss_scale=16777216.0"),
    )
    skipped = []
    while not run.engine.stage.optimizer.updates:
        skipped.append(run.train(1)[0].skipped)
        assert run.state.skipped_in_a_row == 0
    assert sum(skipped) > 3
    run.engine.control.loss_scale.value = 2.0**-14  # it cannot fall any more
    run.step.clip = 0.0
    for bucket in run.engine.stage.buckets:
        bucket.owned_values.fill_(math.nan)
    run.train(2)
    assert run.state.skipped_in_a_row == 2


def test_step_without_learned_tokens(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no weight decay. An evaluation without tokens has no loss."""
    run = trainer(world.single_rank_world(), small_deck("optimizer.weight_decay=0.5"))
    nothing = torch.zeros(32, dtype=torch.int64), torch.full((32,), MASKED)
    monkeypatch.setattr(type(run.step.batches.source), "sequence", lambda *_: nothing)
    before = {name: values.clone() for name, values in run.parameters().items()}
    (result,) = run.train(1)
    assert result.skipped and (run.state.skipped, run.state.skipped_in_a_row) == (1, 1)
    assert all(torch.equal(values, before[name]) for name, values in run.parameters().items())
    figures, tokens, count = run.step.evaluate_with_counts(run.step.batches, 8)
    assert math.isnan(figures["loss"]) and (tokens, count) == (0, 0)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_token_outside_the_vocabulary_is_named(world: World, mpi_tmp_path: Path) -> None:
    """With a split vocabulary, each rank would take the id for a token of another rank."""
    path = mpi_tmp_path / "tokens.h5"
    if world.rank == 0:
        (mpi_tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    world.everyone.barrier()
    prepare(world, path, [str(mpi_tmp_path / "text.txt")])
    if world.rank == 0:
        (mpi_tmp_path / "deck.toml").write_text(DECK.format(folder=mpi_tmp_path))
        with h5py.File(path, "r+") as file:
            file["tokens"][100] = 300
            file["checksums"][0] = zlib.crc32(file["tokens"][:].tobytes())
    world.everyone.barrier()
    with pytest.raises(InputOutputError) as caught:
        run_deck(world, mpi_tmp_path / "deck.toml", ["layout.tensor=2", "run.evaluate_every=1"])
    assert caught.value.problems == (
        f"data.tokens = {path}: token 100 is 300, out of range [0, 257) of its vocabulary; prepare the text "
        "again",
    )
