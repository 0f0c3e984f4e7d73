"""Seconds by cause from what a rank recorded, against sums by hand, and beside those that were planned.

Tests of plan/time/measured_step.py, and of what plan/time/time_text.py says of them.
"""

from __future__ import annotations

import random

import pytest

from hpctrain.plan.time.machine_rates import MachineRates, parse_machine
from hpctrain.plan.time.measured_step import (
    TOGETHER,
    MeasuredStep,
    StepRecord,
    mean,
    middle,
    separate_stage_waits,
    side_by_side,
)
from hpctrain.plan.time.step_plan import CAUSES, StepPlan
from hpctrain.plan.time.time_text import WHAT, WHAT_TOGETHER, comparison_lines
from tests.plan.time.test_machine_rates import FILE

PHASES = {"forward": 10.0, "backward": 20.0, "synchronize": 3.0, "step": 4.0}
# In forward: 1 s of tensor, 0.5 of context, 0.25 of experts, 2 of messages; in backward 1 of tensor, and 0.5
# to start sums of gradients, which are waited for in synchronize for 1 s.
INSIDE = {"forward": 3.75, "backward": 1.5, "synchronize": 1.75, "step": 1.0, "other": 0.125}
CALLS = {
    ("tensor", "all_reduce", "forward"): 1.0,
    ("tensor", "all_reduce", "backward"): 1.0,
    ("context", "send", "forward"): 0.5,
    ("expert x expert_tensor", "all_to_all", "forward"): 0.25,
    ("pipeline", "recv", "other"): 1.5,
    ("pipeline", "send", "forward"): 0.5,
    ("data x context", "reduce_scatter", "backward"): 1.5,
    ("pipeline", "recv", "synchronize"): 0.25,
    ("world", "all_reduce", "synchronize"): 0.5,
    ("data x context", "all_gather", "step"): 0.75,
    ("world", "all_reduce", "step"): 0.25,
    ("data", "all_reduce", "other"): 0.125,
}
RECORD = StepRecord(3, 38.0, PHASES, INSIDE, CALLS, 5.0)


def step_plan(stage: int = 0, **causes: float) -> StepPlan:
    return StepPlan(dict.fromkeys(CAUSES, 0.0) | causes, 2, 100, 1e9, 1e9, 1e9, 1, stage=stage)


def blocking() -> MachineRates:
    return parse_machine(FILE, "")


def test_known_seconds_go_to_their_causes() -> None:
    assert sum(INSIDE.values()) == sum(CALLS.values())
    found = RECORD.by_cause(stages=2, zero=1)
    assert found == pytest.approx(
        {
            "computing": 10 - 3.75 + 20 - 1.5 - 5,
            "stages": 1.5 + 0.5 + 0.5,
            "recompute": 5,
            "tensor": 2,
            "context": 0.5,
            "expert": 0.25,
            "gradients": 1.5 + 0.25,
            "parameters": 0.75,
            "update": (3 - 1.75) + (4 - 1) + 0.25,
            "fixed": 38 - (10 + 20 + 3 + 4),
        }
    )
    assert sum(found.values()) == pytest.approx(38)
    alone = RECORD.by_cause(stages=1, zero=1)
    assert alone["fixed"] - found["fixed"] == pytest.approx(0.5)
    assert found["stages"] - alone["stages"] == pytest.approx(0.5)


def test_what_is_gathered_within_passes_is_parameters_of_zero_3_alone() -> None:
    gathers = CALLS | {("data x context", "all_gather", "forward"): 0.25}
    record = StepRecord(3, 38.0, PHASES, INSIDE, gathers, 5.0)
    cut, whole = record.by_cause(1, 3), record.by_cause(1, 2)
    assert cut["parameters"] == pytest.approx(1.0)
    assert cut["gradients"] == pytest.approx(1.75)
    assert whole["parameters"] == pytest.approx(0.75)  # compressed sums gather, too
    assert whole["gradients"] == pytest.approx(2.0)


def test_every_cause_of_a_plan_is_in_one_row() -> None:
    measured = RECORD.by_cause(2, 1)
    predicted = {cause: float(2**number) for number, cause in enumerate(CAUSES)}
    for apart in (measured, separate_stage_waits(measured, 3, 1)):
        for plan in (predicted, predicted | {"messages": 0.0}):
            rows = side_by_side(plan, apart)
            assert sum(there for _, there, _ in rows) == sum(plan.values())
            assert sum(here for *_, here in rows) == pytest.approx(38)
            joined = "stages" in apart or not plan["messages"]
            assert ("stages" in [name for name, *_ in rows]) == joined


def test_a_trace_tells_messages_from_waiting() -> None:
    apart = separate_stage_waits(RECORD.by_cause(2, 1), bubble=3, messages=1)
    assert (apart["bubble"], apart["messages"]) == pytest.approx((2.5 * 3 / 4, 2.5 / 4))
    assert "stages" not in apart
    assert sum(apart.values()) == pytest.approx(38)
    never = separate_stage_waits(RECORD.by_cause(2, 1), 0, 0)
    assert (never["bubble"], never["messages"]) == (2.5, 0)


def test_disturbed_steps_do_not_count() -> None:
    records = [
        StepRecord(step, seconds, {}, {}, {}, 0) for step, seconds in enumerate([1, 1, 1, 1, 9, 0.5, 1, 1])
    ]
    random.Random(3).shuffle(records)
    assert {each.seconds for each in middle(records)} == {1}
    assert len(middle(records)) == 4
    assert [len(middle(records[:count])) for count in (1, 2, 3, 4)] == [1, 2, 3, 2]
    assert mean([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0}]) == {"a": 2, "b": 2}


def test_the_table_has_both_of_each_cause() -> None:
    step = step_plan(1, products=18.0, attention=1.0, elementwise=1.0, bubble=5.0, tensor=1.0)
    measured = MeasuredStep(38.0, RECORD.by_cause(2, 1), 4, 2)
    head, *rows, total, source, hint = comparison_lines(step, blocking(), measured, 2)
    assert head.split() == ["a", "step", "of", "stage", "1", "predicted", "measured", "deviation"]
    (computing,) = [row for row in rows if row.startswith(WHAT_TOGETHER["computing"])]
    assert computing.split()[-5:] == ["20", "s", "19.8", "s", "+1.3%"]
    (tensor,) = [row for row in rows if row.startswith(WHAT["tensor"])]
    assert tensor.split()[-5:] == ["1", "s", "2", "s", "-50.0%"]
    assert not any(row.startswith(WHAT["messages"]) for row in rows)
    assert total.split() == ["total", "26", "s", "38", "s", "-31.6%"]
    assert source == "Measured: mean of 4 steps and 2 ranks. Predicted: from the rates of ours."
    assert "run.trace = true" in hint
    traced = MeasuredStep(38.0, separate_stage_waits(RECORD.by_cause(2, 1), 3, 1), 4, 2)
    slow = step_plan(1, products=20.0, bubble=5.0, messages=1.0)
    (messages,) = [row for row in comparison_lines(slow, blocking(), traced, 2) if WHAT["messages"] in row]
    assert messages.split()[-5:] == ["1", "s", "625", "ms", "+60.0%"]


def test_gpus_are_compared_as_a_whole() -> None:
    lines = comparison_lines(step_plan(products=2.0), blocking(), MeasuredStep(4.0, None, 4, 2), 1)
    assert [line.split("  ")[0] for line in lines[:2]] == ["a step", "total"]
    assert "Causes are not measured on GPUs" in lines[-1]
    assert MeasuredStep(4.0, None, 4, 2).row() == {"seconds": 4.0, "steps": 4, "ranks": 2}


def test_words_for_all_that_is_measured() -> None:
    assert set(WHAT_TOGETHER) == set(TOGETHER)
    assert {cause for causes in TOGETHER.values() for cause in causes} < set(CAUSES)
