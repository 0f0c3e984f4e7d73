from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Action, Placement, Schedule, accumulation, stage_lines

ACTIONS = st.builds(Action, st.sampled_from("FBIW"), st.integers(0, 999_999), st.integers(0, 999))
SCHEDULES = st.builds(
    Schedule,
    st.lists(st.lists(ACTIONS, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple),
    st.text(max_size=12).map(lambda text: " ".join(text.split())),
    st.sampled_from(["loop", "v"]),
)


def test_accumulation_runs_micro_batches_one_after_another() -> None:
    schedule = accumulation(3)
    assert [str(action) for action in schedule.stages[0]] == ["F0", "B0", "F1", "B1", "F2", "B2"]
    assert (schedule.stage_count, schedule.micro_batches, schedule.chunks) == (1, 3, 1)


def test_a_schedule_prints_as_text() -> None:
    stages = ((Action("F", 0), Action("I", 0), Action("W", 0)), (Action("F", 12, 2),), ())
    assert str(Schedule(stages, "mine", "v")) == (
        "# mine: 3 stages, 13 micro-batches, 3 chunks, v\nF0 I0 W0\nF12.2\n-"
    )


@given(SCHEDULES)
def test_printed_schedules_parse_back(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


def test_text_without_header_and_with_comments_parses() -> None:
    text = "# by hand\n\n  F0 B0 \n# the last stage\nF0\tB0\n"
    schedule = Schedule.parse(text)
    assert stage_lines(text) == (3, 5)
    assert schedule == Schedule(((Action("F", 0), Action("B", 0)),) * 2)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "F0 B0\nF0 X3",
            ["mine:2: 'X3': is not an action (write F, B, I or W, the micro-batch and the chunk "],
        ),
        (
            "F B0 f0\nF0.",
            [f"mine:{line}: {word!r}: is not" for line, word in [(1, "F"), (1, "f0"), (2, "F0.")]],
        ),
        ("F1234567", ["mine:1: 'F1234567': is not an action"]),
        ("F-1", ["mine:1: 'F-1': is not an action"]),
        ("F0 - B0", ["mine:1: '-': is not an action"]),
        ("F²", ["mine:1: 'F²': is not an action"]),
        (
            "# nothing\n",
            ["mine: contains no stage (write one line of actions, such as F0 B0, for each stage)"],
        ),
        ("", ["mine: contains no stage"]),
        (
            "# a: 2 stages, 1 micro-batch, 2 chunks, loop\nF0 B0",
            [
                "mine:1: the header has 2 stages, but the lines below have 1",
                "mine:1: the header has 2 chunks",
            ],
        ),
        (
            "# a: 1 stage, 1 micro-batch, 1 chunk, loop\n# b: 1 stage, 1 micro-batch, 1 chunk, v\nF0 B0",
            ["mine:2: repeats the header of line 1"],
        ),
        ("\n".join(["X"] * 13), [*(f"mine:{line}: 'X'" for line in range(1, 11)), "mine: and 3 more"]),
    ],
)
def test_parse_errors_name_line_and_word(text: str, problems: list[str]) -> None:
    with pytest.raises(HpctrainError) as raised:
        Schedule.parse(text, "mine")
    assert len(raised.value.problems) == len(problems)
    for told, expected in zip(raised.value.problems, problems, strict=True):
        assert told.startswith(expected)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("loop", [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]),
        ("v", [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]),
    ],
)
def test_stage_and_chunk_of_each_part(placement: Placement, expected: list[tuple[int, int]]) -> None:
    schedule = Schedule(((Action("F", 0), Action("F", 0, 1)),) * 3, "", placement)
    assert schedule.parts == 6
    assert [schedule.stage_and_chunk(part) for part in range(6)] == expected
    assert [schedule.part(stage, chunk) for stage, chunk in expected] == list(range(6))
