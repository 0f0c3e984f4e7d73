"""Warnings of dead experts: after how many steps, once for each, and not of steps that were skipped."""

from __future__ import annotations

import logging

import pytest
import torch

from hpctrain.model.shape import ModelShape
from hpctrain.train.dead_experts import STEPS, DeadExperts
from hpctrain.train.hook import StepDone
from hpctrain.train.step import StepResult, TrainState
from tests.model.mixtures.test_expert_load import SHAPE, noted


def make(hook: DeadExperts, step: int, *tokens: float, skipped: bool = False) -> None:
    """A step in which so many tokens went to the experts of block 3, and some to all of block 1."""
    values = noted(1, 1, 1, 1, 1, 0, 0.0) | noted(3, *tokens, 0, 0.0)
    result = StepResult({"loss": 1.0}, 1.0, 1e-3, 8, 256, skipped, values)
    hook.after_step(StepDone(result, TrainState(step), 0.1, 0.1))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_an_expert_is_named_once_after_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    hook = DeadExperts(SHAPE, rank=0)
    for step in range(1, STEPS):
        make(hook, step, 3, 0, 0, 1)
    assert warned(caplog) == []
    make(hook, STEPS, 3, 0, 1, 1)
    (sentence,) = warned(caplog)
    assert sentence.startswith(f"step {STEPS}: expert 1 of block 3 received no token for {STEPS} steps")
    # The third one begins anew; the second is told of already, even if it comes back for a while.
    for step in range(STEPS + 1, 2 * STEPS):
        make(hook, step, 3, int(step == STEPS + 5), 0, 1)
    assert warned(caplog) == []
    for step in range(2 * STEPS, 3 * STEPS):
        make(hook, step, 3, 0, 0, 1)
    (sentence,) = warned(caplog)
    assert sentence.startswith(f"step {2 * STEPS}: expert 2 of block 3 received no token ")


def test_several_are_told_of_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    hook = DeadExperts(SHAPE, rank=0)
    for step in range(1, STEPS + 1):
        make(hook, step, 0, 0, 4, 0)
    (sentence,) = warned(caplog)
    assert "experts 0-1, 3 of block 3 received no token" in sentence


def test_skipped_steps_and_other_ranks_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    hook, other = DeadExperts(SHAPE, rank=0), DeadExperts(SHAPE, rank=1)
    for step in range(1, STEPS + 11):
        make(hook, step, 3, 0, 1, 1, skipped=step % 10 == 0)
        make(other, step, 3, 0, 1, 1)
    assert warned(caplog) == []
    make(hook, STEPS + 11, 3, 0, 1, 1)
    assert len(warned(caplog)) == 1


def test_a_dense_model_has_none_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    dense = ModelShape(family="gpt2", layers=2, hidden=8, heads=2, key_value_heads=2, mlp=8, vocabulary=11,
                       sequence=4, tied=True)  # fmt: skip
    hook = DeadExperts(dense, rank=0)
    hook.after_step(StepDone(StepResult({"loss": 1.0}, 1.0, 1e-3, 8, 256, False), TrainState(1), 0.1, 0.1))
    assert torch.numel(hook.idle) == 0
    assert warned(caplog) == []
