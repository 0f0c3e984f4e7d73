"""What is said of runs that part: how far, on which ranks, of which samples, and which of both is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.comm.world import World
from hpctrain.train.common_start import CommonStart
from hpctrain.train.divergence import ROUNDING_LIMITS, StepComparison
from hpctrain.train.fingerprints import PHASES
from hpctrain.train.verdict import ComparisonResult, RecordMismatch, _hints, phase_table, verdict_of
from tests.train.planted import Plant, in_moment, in_sum, in_weights, no_reduction, other_kernel, other_token
from tests.train.test_divergence import BIAS, DATA, UP, steps_of


def said(world: World, plant: Plant) -> tuple[str, list[str]]:
    """The verdict on a trainer beside one in which something is planted, and the table of its phases."""
    one, other = steps_of(world, DATA), steps_of(world, DATA, plant)
    comparison = StepComparison(ROUNDING_LIMITS["fp32"], same_layout=True, exact=True)
    found: Any = []
    for number, each in enumerate(other, 1):
        found = comparison.of(one[number - 1], each)
        if comparison.first(found) is not None:
            break
    run: Any = SimpleNamespace(rows={})
    start = CommonStart(0, True, None, None)
    code, lines = verdict_of(
        ComparisonResult(run, run, start, one, other[:number], found, True, None, [], comparison.rounding)
    )
    assert code == 1
    return " ".join(lines), phase_table(found, True, None)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_the_run_and_the_rank_that_are_wrong_are_told(world: World) -> None:
    text, table = said(world, no_reduction(BIAS))
    assert f"in step 2, in the sums of gradients: gradient of {BIAS}, by " in text
    assert "In the second run it is not the sum of the gradients of its ranks" in text
    assert [row.split()[0] for row in table] == ["phase", *PHASES]
    text, _ = said(world, in_sum(UP, rank=1))
    assert "only on rank 1 (rounding: at most 1e-04)." in text


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize(
    ("largest", "clause"), [(0.0, "both records."), (1e-7, "both records up to rounding.")]
)
def test_records_of_another_layout_are_equal_up_to_rounding(
    world: World, largest: float, clause: str
) -> None:
    steps, rounding = steps_of(world, DATA), ROUNDING_LIMITS["fp32"]
    run: Any = SimpleNamespace(rows={}, step_losses={steps[-1].step: None})
    mismatch = RecordMismatch(run, None, None, None, largest, ["another layout"], [], 0, None)
    start, mismatches = CommonStart(0, True, None, None), [mismatch, mismatch]
    result = ComparisonResult(run, run, start, steps, steps, [], True, None, mismatches, rounding)
    code, [line] = verdict_of(result)
    assert code == 0 and line.endswith(f"are equal, bit for bit, and equal to {clause}")


@pytest.mark.mpi(max_size=1)
def test_what_is_different_is_told(world: World) -> None:
    text, _ = said(world, other_token())
    assert text == "The runs first differ in step 2, in its samples: tokens, of 1 sample (9)."
    text, table = said(world, other_kernel(UP))
    assert "in the forward pass: output of blocks.1, by" in text
    assert "This is as small as rounding (at most 1e-05), but layout, versions, kernels and keys are" in text
    assert table[3].split()[:4] == ["forward", "5", "3", "0"]
    text, _ = said(world, in_weights(UP))
    assert f"before the step: parameter {UP}, by" in text
    assert "In the second run it changed in memory between two steps." in text
    text, _ = said(world, in_moment(UP))
    assert f"before the step: exp_avg of {UP}, by" in text


def test_an_update_that_one_run_left_out_is_told() -> None:
    spiked, clean = (SimpleNamespace(rows={3: row}) for row in ({"spike": "far above"}, {}))
    first: Any = SimpleNamespace(phase="update", step=3)
    for runs, hint in (
        ((spiked, clean), ["The first run skipped this update because of a spike."]),
        ((clean, spiked), ["The second run skipped this update because of a spike."]),
        ((spiked, spiked), []),
    ):
        found: Any = SimpleNamespace(one=runs[0], other=runs[1], first=[None], second=[None])
        assert _hints(found, first) == hint
