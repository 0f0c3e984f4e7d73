"""Rates as parts have them within a block: what takes longer then, and what does not.

Tests of plan/calibrate/block_rates.py.
"""

from __future__ import annotations

import pytest

from hpctrain.plan.calibrate.block_rates import TimedBlocks, block_factor, launch_seconds, scale_block_rates
from hpctrain.plan.time.machine_rates import MachineRates, parse_machine
from hpctrain.plan.time.step_plan import plan_step
from tests.engines import small_deck
from tests.plan.calibrate.test_machine_file import MEASURED

COMPUTED = {"products", "attention"}


def machine() -> MachineRates:
    kinds = "\n".join(f"{kind} = [1e-9, 2e-9]" for kind in ("add", "activation", "loss", "lookup"))
    bf16 = "\n[machine.products.bf16]\npeak = 2e11\nefficiency = 0.8\nsaturation = 10.0\n"
    return parse_machine(
        MEASURED.replace("norm = [1e-10, 2e-10]", f"norm = [1e-9, 1e-9]\n{kinds}") + bf16, ""
    )


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_twice_as_long(form: str) -> None:
    deck = small_deck(f"precision.compute={form}", "layout.tensor=2", "memory.recompute=full")
    before = machine()
    after = scale_block_rates(before, form, 2.0)
    once, twice = (plan_step(deck, 4, 61, each).seconds_by_cause for each in (before, after))
    for cause, seconds in once.items():
        if cause in COMPUTED:
            assert twice[cause] == pytest.approx(2 * seconds)
        elif cause in {"elementwise", "recompute"}:
            assert seconds < twice[cause] <= 2 * seconds * (1 + 1e-9)
        else:
            assert twice[cause] == pytest.approx(seconds)


def test_other_formats_stay_as_they_are() -> None:
    before = machine()
    after = scale_block_rates(before, "bf16", 1.5)
    assert (after.products["fp32"], after.attention, after.elementwise) == (
        before.products["fp32"],
        before.attention,
        before.elementwise,
    )
    assert scale_block_rates(before, "bf16", 1.0) == before


def test_what_blocks_take_beside_their_parts_is_found() -> None:
    """Of seconds that are made up: by a time for each operation, or a factor."""
    before = machine()
    blocks = TimedBlocks.of([small_deck(), small_deck("model.hidden=64")], 2, 1e9)
    told = before.model_copy(update={"launch": 3e-6})
    assert launch_seconds(blocks, blocks.planned(told), before) == pytest.approx(3e-6)
    assert launch_seconds(blocks, [0.0, 0.0], before) == 0.0
    slower = blocks.planned(scale_block_rates(before, "fp32", 1.25))
    assert block_factor(blocks, [slower, slower], before) == pytest.approx(1.25, rel=0.02)
    longer = [2 * each for each in slower]
    assert block_factor(blocks, [longer, slower], before) == pytest.approx(1.25, rel=0.02)
    quicker = [0.5 * each for each in slower]
    assert block_factor(blocks, [quicker, slower], before) == pytest.approx(0.625, rel=0.02)


def test_blocks_that_cannot_be_timed_are_left_out() -> None:
    mixture = small_deck(
        "model.family=llama", "model.experts.count=4", "model.experts.per_token=2", "model.mlp=48"
    )
    assert TimedBlocks.of([mixture], 2, 1e9).decks == ()
    assert TimedBlocks.of([small_deck()], 2, 1e3).decks == ()
    empty = TimedBlocks(())
    assert block_factor(empty, [[]], machine()) == 1.0
    assert launch_seconds(empty, [], machine()) == 0.0
