"""Planned updates: what rules read and write, and Muon's products.

Tests of plan/time/update_seconds.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.engine.stages.update_rules import RULES
from hpctrain.optim.matrix.muon import orthogonalize
from hpctrain.plan.time.machine_rates import parse_machine
from hpctrain.plan.time.step_plan import plan_step
from hpctrain.plan.time.update_seconds import ADAMW, UpdateNumbers
from tests.engines import LLAMA, small_deck
from tests.plan.time.test_machine_rates import FILE

VOCABULARY = 61


def planned(machine: str, ranks: int, *keys: str) -> Mapping[str, float]:
    return plan_step(small_deck(*keys), ranks, VOCABULARY, parse_machine(machine, "")).seconds_by_cause


@pytest.mark.parametrize(
    ("name", "momentum", "numbers"),
    [
        *[("adamw", 0.0, 2), ("sgd", 0.0, 0), ("sgd", 0.9, 1), ("lion", 0.0, 1)],
        *[("schedule-free", 0.0, 2), ("adam-mini", 0.0, 1)],
    ],
)
def test_a_rule_moves_what_belongs_to_an_element(name: str, momentum: float, numbers: int) -> None:
    """Weight, gradient and state are read, weight and state written: of AdamW in fp32 28 bytes."""
    keys = (f"optimizer.name={name}", *([f"optimizer.momentum={momentum}"] if momentum else []))
    seconds = planned(FILE, 1, *keys)["optimizer"]
    assert seconds / planned(FILE, 1)["optimizer"] == pytest.approx((12 + 8 * numbers) / 28)
    assert ADAMW.traffic(2, 4) == 28
    assert ADAMW.traffic(2, 2) == 30


def test_every_rule_is_planned() -> None:
    for name in RULES:
        assert planned(FILE, 2, f"optimizer.name={name}")["optimizer"] > 0


def test_what_was_measured_of_adamw_scales() -> None:
    measured = FILE.replace('name = "ours"', 'name = "ours"\noptimizer = 1e6')
    adamw, lion = (planned(measured, 1, f"optimizer.name={name}")["optimizer"] for name in ("adamw", "lion"))
    assert lion / adamw == pytest.approx(20 / 28)


def test_muon_multiplies_as_often_as_its_iterations_do() -> None:
    """Of its matrices' products alone: without saturation, FLOPs at the peak's share."""
    flat = FILE.replace("saturation = 100.0", "saturation = 0.0")
    deck = small_deck("optimizer.name=muon", "optimizer.muon.newton_schulz=fp32", *LLAMA)
    muon = UpdateNumbers.of(deck).muon
    assert muon is not None
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.ones(512, 1024), muon.steps)
    # A CPU computes the lower half of what is symmetric alone; the plan, as devices do, all of it.
    assert muon.steps * 2 * 512 * 512 * (2 * 1024 + 512) > counter.get_total_flops() > 0
    once, twice = (
        planned(
            flat,
            1,
            "optimizer.name=muon",
            "optimizer.muon.newton_schulz=fp32",
            f"optimizer.muon.newton_schulz_steps={n}",
        )
        for n in (5, 10)
    )
    assert twice["optimizer"] > once["optimizer"]
    without = 2 * once["optimizer"] - twice["optimizer"]  # what moves, by elements
    assert 0 < without < once["optimizer"]


def test_ranks_share_the_matrices_and_hand_on_what_comes_of_them() -> None:
    muon = ("optimizer.name=muon", "batch.global_size=16")
    alone, four = planned(FILE, 1, *muon), planned(FILE, 4, *muon)
    assert four["optimizer"] < alone["optimizer"]
    assert alone["parameters"] == 0 < four["parameters"]
