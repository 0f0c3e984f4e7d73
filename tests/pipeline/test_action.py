from __future__ import annotations

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Action, Schedule, accumulation


def test_accumulation_does_every_micro_batch_in_turn() -> None:
    schedule = accumulation(3)
    assert str(schedule) == "F0 B0 F1 B1 F2 B2"
    assert schedule.micro_batches == 3


def test_text_parses_back() -> None:
    schedule = Schedule(((Action("F", 0), Action("B", 0, 1)), (Action("F", 12, 2),)))
    assert str(schedule) == "F0 B0.1\nF12.2"
    assert Schedule.parse(str(schedule)) == schedule


def test_what_is_no_action_is_named() -> None:
    with pytest.raises(HpctrainError, match="stage 1: 'X3' is no action"):
        Schedule.parse("F0 B0\nF0 X3")
