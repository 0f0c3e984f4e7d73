"""Figures of mixtures: against closed forms, and the same on all layouts."""

from __future__ import annotations

from math import log

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.model.mixtures.expert_load import ExpertLoad
from hpctrain.model.shape import ModelShape
from tests.engines import LLAMA, by_rank_0, reference, small_deck, trainer

SHAPE = ModelShape(
    family="llama",
    layers=4,
    hidden=8,
    heads=2,
    key_value_heads=2,
    mlp=8,
    vocabulary=11,
    sequence=4,
    tied=False,
    experts=ExpertsTable(count=4, mlp=8, every=2, balance_loss=0.01),
)

MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=16")


def noted(block: int, *values: float) -> dict[str, torch.Tensor]:
    return {f"router/blocks.{block}.feed_forward.router": torch.tensor(values, dtype=torch.float64)}


def test_a_row_has_one_value_a_mixture() -> None:
    # 20 tokens of two choices each, of which 4 were dropped; 10 tokens of the other one, to two experts.
    load = ExpertLoad.of(noted(1, 20, 5, 15, 0, 4, 20 * log(4)) | noted(3, 10, 10, 0, 0, 0, 0), SHAPE)
    assert load is not None
    row = load.row()
    assert list(row) == ["blocks", "load", "unused", "dropped", "entropy"]
    assert (row["blocks"], row["load"], row["unused"]) == ([1, 3], [2.0, 2.0], [1, 2])
    assert row["dropped"] == [0.1, 0.0]
    assert row["entropy"] == pytest.approx([log(4), 0.0])


def test_a_dense_model_has_none() -> None:
    dense = ModelShape(family="gpt2", layers=2, hidden=8, heads=2, key_value_heads=2, mlp=8, vocabulary=11,
                       sequence=4, tied=True)  # fmt: skip
    assert ExpertLoad.of({}, dense) is None


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize(
    "layout",
    [
        ("layout.expert=2",),
        ("layout.tensor=2",),
        ("layout.context=2", "layout.expert=2"),
        ("layout.pipeline=2",),
    ],
    ids="-".join,
)
@pytest.mark.parametrize(
    "more", [(), ("model.experts.capacity=1.0", "memory.recompute=full")], ids=["all", "dropping"]
)
def test_figures_are_those_of_one_rank(world: World, layout: tuple[str, ...], more: tuple[str, ...]) -> None:
    keys = (*MIXTURE, *more, "batch.global_size=8", "batch.micro_size=1")

    def row(result: object, shape: ModelShape) -> dict[str, list[float]]:
        load = ExpertLoad.of(result.statistics, shape)  # type: ignore[attr-defined]
        assert load is not None
        assert load.tokens.sum(1).tolist() == [7 * 32 * 2] * 2
        return load.row()

    def of_one() -> dict[str, list[float]]:
        training = reference(world, small_deck(*keys))
        return row(training.train_step(7), training.engine.shape)

    expected = by_rank_0(world, of_one)
    training = trainer(world, small_deck(*keys, *layout))
    found = row(training.train_step(7), training.engine.shape)
    assert {name: found[name] for name in ("blocks", "load", "unused", "dropped")} == {
        name: expected[name] for name in ("blocks", "load", "unused", "dropped")
    }
    assert found["entropy"] == pytest.approx(expected["entropy"], rel=1e-5)
    assert (max(found["dropped"]) > 0) == bool(more)
