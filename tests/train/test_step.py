"""The step as a whole: accumulation, skipped steps, loss scale, evaluation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.data.batches import Batches, MicroBatch
from hpctrain.data.synthetic import SyntheticSource
from hpctrain.errors import InputOutputError
from hpctrain.model.part import logits_of
from hpctrain.pipeline.execute import PreparedBatch
from tests.engines import small_deck, trainer


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_non_finite_step_is_skipped_on_all_ranks_and_counted(world: World) -> None:
    run = trainer(world, small_deck())
    run.train(1)
    before = {name: values.clone() for name, values in run.parameters().items()}
    moments = [moment["exp_avg"].clone() for moment in run.engine.stage.optimizer.states]
    prepare = run.step.prepare

    def spoiled(micro: MicroBatch, scale: Tensor, *others: Any) -> PreparedBatch:
        bad = scale * float("nan") if world.rank == world.size - 1 else scale
        return prepare(micro, bad, *others)

    run.step.prepare = spoiled  # type: ignore[method-assign]
    result = run.train(1)[0]
    assert result.skipped
    assert math.isnan(result.grad_norm)
    assert (run.state.step, run.state.skipped, run.engine.stage.optimizer.updates) == (2, 1, 1)
    for name, values in run.parameters().items():
        assert torch.equal(values, before[name]), name
    for moment, earlier in zip(run.engine.stage.optimizer.states, moments, strict=True):
        assert torch.equal(moment["exp_avg"], earlier)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_one_rank_cannot_read_ends_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(world, small_deck())
    source = run.step.batches.source

    def damaged(_: int) -> tuple[Tensor, Tensor]:
        raise InputOutputError("tokens.h5: piece 3 of 4")

    if world.rank == world.size - 1:
        monkeypatch.setattr(type(source), "sequence", lambda _, index: damaged(index))
    for read in (lambda: run.train(1), lambda: run.step.evaluate(run.step.batches, 2 * world.size)):
        with pytest.raises(InputOutputError) as caught:
            read()
        assert caught.value.problems == ("tokens.h5: piece 3 of 4",)
        assert world.is_agreed(caught.value)
    assert run.state.step == 0


@pytest.mark.mpi(min_size=1, max_size=2)
def test_fp16_finds_its_loss_scale(world: World) -> None:
    """From a scale that overflows, steps are skipped until gradients are finite; then training goes on."""
    run = trainer(
        world,
        small_deck("precision.compute=fp16", "precision.initial_loss_scale=16777216.0"),
    )
    results = run.train(20)
    skipped = [result.skipped for result in results]
    assert skipped[0]
    first_good = skipped.index(False)
    assert run.state.skipped == sum(skipped) < 12
    assert run.engine.control.loss_scale.value == 2.0 ** (24 - run.state.skipped)
    assert results[-1].loss < results[first_good].loss
    assert run.engine.stage.optimizer.updates == 20 - run.state.skipped


@pytest.mark.mpi(min_size=1, max_size=2)
def test_accumulated_micro_batches_are_one_batch(world: World) -> None:
    """Masked targets make their token counts uneven; every token weighs the same all the same."""
    small, large = (
        trainer(world, small_deck("batch.micro_size=1")),
        trainer(world, small_deck("batch.micro_size=4")),
    )
    losses = [run.train(1)[0].loss for run in (small, large)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    others = large.gradients()
    for name, gradient in small.gradients().items():
        scale = others[name.replace(".key.bias", ".query.bias")].abs().max()
        assert (gradient - others[name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.mpi(min_size=1, max_size=2)
def test_evaluation_is_the_mean_over_tokens_and_changes_nothing(world: World) -> None:
    run = trainer(world, small_deck("model.dropout=0.3"))
    before = {name: values.clone() for name, values in run.parameters().items()}
    source = SyntheticSource(32, 61, count=7, seed=9, masked=0.3)
    loss = run.step.evaluate(Batches(source, 0), 100)["loss"]
    # Untrained and with small random logits, every token is nearly as likely as any other.
    assert loss == pytest.approx(math.log(61), rel=0.1)
    again = run.step.evaluate(Batches(source, 0), 7)["loss"]
    assert again == loss
    for name, values in run.parameters().items():
        assert torch.equal(values, before[name])
    logits = logits_of(run.engine.model, torch.stack([source.sequence(i)[0] for i in range(7)]))
    targets = torch.stack([source.sequence(i)[1] for i in range(7)])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_clipping_limits_the_update(world: World) -> None:
    run = trainer(world, small_deck("optimizer.clip=0.01"))
    result = run.train(1)[0]
    assert result.grad_norm > 0.01
    norm = torch.stack([g.double().square().sum() for g in run.gradients().values()]).sum().sqrt().item()
    assert norm == pytest.approx(0.01, rel=1e-3)
