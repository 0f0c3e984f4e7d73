"""What a pipeline waits for by the FLOPs of its layers."""

from __future__ import annotations

import pytest

from hpctrain.plan.pipeline_plan import PipelinePlan, plan_pipeline
from tests.costs.layer_bytes.test_module_trace import deck_of
from tests.engines import small_deck


def plan_of(vocabulary: int, *overrides: str) -> PipelinePlan:
    deck = small_deck("model.layers=6", "model.tied=false", "layout.pipeline=2", *overrides)
    plan = plan_pipeline(deck, 2, vocabulary)
    assert plan is not None
    return plan


def test_stages_alike_wait_as_the_formula_says() -> None:
    """The bubble of 1F1B over the ideal time is (p - 1) / m (arXiv 2104.04473)."""
    plan = plan_of(2, "batch.global_size=16")
    assert plan.split == (3, 3) and plan.micro_batches == 8
    assert plan.loads == pytest.approx((1, 1), abs=2e-3)
    assert plan.waiting == pytest.approx(1 / 9, abs=2e-3)


def test_modules_wait_as_our_own_models_of_their_sizes() -> None:
    own = small_deck(
        *("model.family=llama", "model.layers=2", "model.hidden=64", "model.heads=4", "model.tied=false"),
        *("model.key_value_heads=2", "model.mlp=160", "batch.micro_size=2", "batch.sequence=64"),
        "layout.pipeline=2",
    )
    theirs = deck_of("llama", "layout.pipeline=2")
    expected, plan = (plan_pipeline(deck, 2, 61) for deck in (own, theirs))
    assert plan is not None and expected is not None
    assert (plan.split, plan.micro_batches) == (expected.split, expected.micro_batches)
    assert plan.loads == pytest.approx(expected.loads, rel=0.02)
    assert plan.waiting == pytest.approx(expected.waiting, rel=0.05)


def test_a_heavy_head_is_told() -> None:
    """By hand: five blocks of three units each beside a head of 16 on the other stage; one micro-batch."""
    unit = 24 * 32**2 + 4 * 32 * 32  # a block's forward
    vocabulary = 16 * unit // (6 * 32)
    plan = plan_of(vocabulary, "batch.global_size=2")
    assert plan.split == (6, 0)
    assert plan.loads == pytest.approx((18 / 17, 16 / 17), rel=1e-3)
    assert plan.waiting == pytest.approx(0.5, rel=1e-6)
    assert plan.row()["split"] == [6, 0]
    told = "1f1b, 1 micro-batch, blocks per chunk 6, 0: the largest stage has 1.06 times the mean FLOPs"
    assert str(plan) == f"{told}, and the bubble is 50% of a step"


def test_none_of_one_stage() -> None:
    assert plan_pipeline(small_deck(), 2, 61) is None
