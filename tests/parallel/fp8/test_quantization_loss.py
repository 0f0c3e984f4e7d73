"""What products in 8 bits are told to lose, against numpy, and that being watched changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.parallel.fp8.formats import E4M3, E5M2, Fp8Format
from hpctrain.parallel.fp8.quantization_loss import (
    Row,
    count_losses,
    loss_metrics,
    name_without_block,
    operand_name,
    record_loss,
)
from hpctrain.parallel.fp8.quantize import Scaling
from hpctrain.parallel.fp8.recipes import RECIPES
from hpctrain.parallel.step_statistics import StepStatistics
from hpctrain.train.run_hooks import QuantizationLossHook
from tests.engines import LLAMA, Trainer, small_deck, trainer
from tests.parallel.fp8.given import normal

SCALINGS = {
    "tensor": RECIPES["tensor"].tokens,
    "row": RECIPES["row"].tokens,
    "row, transposed": RECIPES["row"].tokens.transposed,
    "block": RECIPES["block"].tokens,
    "block of weights": RECIPES["block"].weights,
    "mx": RECIPES["mx"].tokens,
}


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_counts_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, scaling: Scaling, form: Fp8Format
) -> None:
    """Of blocks, some with maxima of before that are too small, and of few rows at a time."""
    monkeypatch.setattr("hpctrain.parallel.fp8.quantize.ELEMENTS_AT_ONCE", 1000)
    matrix = normal(150, 140) * torch.exp2(normal(150, 140, seed=1) * 6)
    matrix[3], matrix[:, 5] = 0, 0
    maxima = scaling.maxima(matrix)
    maxima.view(-1)[::2] /= 16
    found = scaling.quantize(matrix, form, maxima)
    rows, columns = (matrix.shape[dim] if size is None else size for dim, size in enumerate(scaling.blocks))
    scales = np.repeat(np.repeat(found.fp32_scales.numpy(), rows, 0), columns, 1)[:150, :140]
    scaled = np.abs(matrix.double().numpy()) / scales
    # What lies just between zero and the smallest number goes to zero, which is even.
    gone = (scaled > 0) & (scaled <= form.smallest / 2)
    expected = [(scaled > form.largest).sum(), gone.sum(), matrix.numel()]
    assert expected[0] > 0 and expected[1] > 0
    assert count_losses(matrix, found).tolist() == expected
    assert count_losses(matrix.t(), found.transposed()).tolist() == expected


def test_a_line_has_shares_and_scales_by_kind_of_layer() -> None:
    noted, scaling = StepStatistics(), RECIPES["row"].tokens

    def note(block: int, kind: str, matrix: torch.Tensor, maxima: torch.Tensor) -> None:
        found = scaling.quantize(matrix, E4M3, maxima)
        name = operand_name(f"blocks.{block}.a.up.weight", kind, "tokens inputs")
        record_loss(noted, name, matrix, maxima, found)

    ones = torch.ones(2, 4)
    noted.begin_action(0)
    note(0, "inputs", ones, torch.ones(2, 1))  # nobody watches
    noted.detailed_step = True
    noted.begin_action(None)
    note(0, "inputs", ones, torch.ones(2, 1))  # no training step
    for _ in range(2):  # as when it is computed again
        noted.begin_action(0)
        note(0, "inputs", ones, torch.ones(2, 1))
        note(1, "inputs", ones, torch.tensor([[4.0], [0.5]]))
    noted.begin_action(1)
    note(0, "inputs", torch.tensor([[1e-9, 448.0, 0, 448]]), torch.tensor([[448.0]]))
    note(0, "gradients", torch.zeros(3, 4), torch.zeros(3, 1))
    row = loss_metrics(noted.reduce(World.start("cpu").single_rank_world().everyone))
    assert row is not None
    assert row["layers"] == ["a.up"]
    # Of 20 inputs a row of four has a maximum half as large, and one is too small.
    assert row["inputs_saturated"] == [4 / 20] and row["inputs_underflowed"] == [1 / 20]
    # The least power of two that keeps 0.5 within 448 is 2^-9, and 448 has 2^0.
    assert (row["inputs_scale_least"], row["inputs_scale_largest"]) == ([-9.0], [0.0])
    assert (row["gradients_scale_least"], row["gradients_scale_largest"]) == ([None], [None])
    assert (row["gradients_underflowed"], row["weights_saturated"]) == ([0.0], [0.0])


def test_a_step_that_nobody_watches_has_no_line() -> None:
    assert loss_metrics({"fp8/blocks.0.a.weight/inputs": torch.ones(1)}) is None


def test_kinds_of_layers() -> None:
    assert name_without_block("blocks.12.attention.query.weight") == "attention.query"
    assert name_without_block("blocks.3.feed_forward.experts.2.down.weight") == "feed_forward.experts.down"


KEYS = (*LLAMA, "model.layers=4", "model.tied=false", "layout.schedule=1f1b", "precision.compute=fp8")


def steps(world: World, watch: bool, *keys: str) -> tuple[Trainer, list[float], list[Row | None]]:
    """A trainer after three steps, of which the last two are watched, or none; losses and rows."""
    run = trainer(world, small_deck(*KEYS, *keys))
    losses, rows = [], []
    for step in range(3):
        run.engine.stage.layer_context.statistics.detailed_step = watch and step > 0
        result = run.train(1)[0]
        losses += [result.loss, result.grad_norm]
        rows.append(loss_metrics(result.statistics))
    return run, losses, rows


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_being_watched_changes_no_bit(world: World, recipe: str) -> None:
    keys = () if recipe == "delayed" else (f"precision.fp8={recipe}",)
    run, losses, rows = steps(world, True, *keys)
    other, unwatched, none = steps(world, False, *keys)
    assert losses == unwatched and none == [None] * 3
    assert rows[0] is None
    for row in rows[1:]:
        assert row is not None and len(row) == 1 + 3 * 4 and len(row["layers"]) == 4
        assert all(None not in values for values in row.values())  # all of it was seen
    for name, values in run.parameters().items():
        assert torch.equal(values, other.parameters()[name])


@pytest.mark.mpi(min_size=1, max_size=1)
def test_steps_are_watched_as_a_deck_says(world: World) -> None:
    run = trainer(world, small_deck(*KEYS, "precision.fp8=row", "precision.fp8_watch=2"))
    run.hooks.append(QuantizationLossHook(run))
    rows = [loss_metrics(run.train_step().statistics) for _ in range(5)]
    assert [row is not None for row in rows] == [False, True, False, True, False]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "keys",
    [
        ("layout.zero=3", "memory.recompute=full"),
        ("layout.pipeline=2", "layout.schedule=zb-h1", "memory.recompute=selective"),
    ],
    ids=["data", "pipeline"],
)
def test_ranks_tell_what_one_rank_tells(world: World, keys: tuple[str, ...]) -> None:
    """In the first step that is watched; a learning rate of nothing, as sums have other last bits."""
    still = "learning_rate.peak=1e-9"
    _, _, expected = steps(world.single_rank_world(), True, still)
    _, _, found = steps(world, True, still, *keys)
    assert found == expected and found[1] is not None
