from __future__ import annotations

import random

import pytest

from hpctrain.pipeline.action import Action, Schedule, stage_lines
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.schedule_check import ScheduleProblem, check_schedule, schedule_error

GOOD = [
    "F0 B0",
    "F0 I0 F1 I1 W0 W1",
    "F1 B1 F0 B0\nF1 B1 F0 B0",  # micro-batches in any order
    "F0 B0 F1 I1 W1\nF0 I0 W0 F1 B1",  # whole and split backward side by side
    "F0 F0.1 B0.1 B0\nF0 F0.1 B0.1 B0",
    "# 2 stages, 1 micro-batch, 2 chunks, v\nF0 F0.1 B0.1 B0\nF0 F0.1 B0.1 B0",
]


@pytest.mark.parametrize("text", GOOD)
def test_valid_schedules_have_no_problems(text: str) -> None:
    assert check_schedule(Schedule.parse(text)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Missing.
        ("F0 B0\nF0", ["stage 1, B0: is missing, as are I0 and W0"]),
        ("F0 B0 B1\nF0 B0 F1 B1", ["stage 0, F1: is missing"]),
        ("F0 I0", ["stage 0, W0: is missing: I0 is only a part of the backward pass"]),
        ("F0 W0", ["stage 0, I0: is missing: W0 is only a part of the backward pass"]),
        ("F0 B0\n-", ["stage 1, F0: is missing", "stage 1, B0: is missing"]),
        ("-", ["stage 0, F0: is missing", "stage 0, B0: is missing"]),
        ("F0 F0.1 B0.1 B0\nF0 B0", ["stage 1, F0.1: is missing", "stage 1, B0.1: is missing"]),
        # Doubled.
        ("F0 F0 B0", ["stage 0, F0 (action 2): is a duplicate of action 1"]),
        (
            "F0 I0 W0 B0",
            [
                f"stage 0, {it}): is a duplicate: B0 already contains"
                for it in ("I0 (action 2", "W0 (action 3")
            ],
        ),
        # Order on one stage.
        ("B0 F0", ["stage 0, B0 (action 1): requires F0, which comes later (action 2)"]),
        ("F0 W0 I0", ["stage 0, W0 (action 2): requires I0, which comes later (action 3)"]),
        ("F0.1 F0 B0.1 B0", ["stage 0, F0.1 (action 1): requires F0, which comes later (action"]),
        ("F0 F0.1 B0 B0.1", ["stage 0, B0 (action 3): requires B0.1, which comes later (action"]),
        ("F0 F0.1 I0 I0.1 W0 W0.1", ["stage 0, I0 (action 3): requires I0.1, which comes later (action"]),
        # Stages that wait for one another.
        (
            "F0 B0 F1 B1\nF0 F1 B0 B1",
            [
                "stage 0, B0 (action 2): deadlock: waits for B0 of stage 1, which waits at F1",
                "stage 1, F1 (action 2): deadlock: waits for F1 of stage 0, which waits at B0",
            ],
        ),
        (
            "F0 I0 F1 W0 I1 W1\nF0 I0 F1 W0 I1 W1\nF0 F1 I0 I1 W0 W1",
            [
                "stage 1, I0 (action 2): deadlock: waits for I0 of stage 2, which waits at F1",
                "stage 2, F1 (action 2): deadlock: waits for F1 of stage 1, which waits at I0",
            ],
        ),
        # The same with blocking sends only: tensors in another order, and more than there is room for.
        (
            "F0 F1 B0 B1\nF1 B1 F0 B0",
            [
                "stage 0, F0 (action 1): deadlock with blocking sends: its send does not complete: "
                "stage 1 first receives micro-batch 1 and waits at F1",
                "stage 1, F1 (action 1): deadlock with blocking sends: waits for F1 of stage 0, which "
                "waits at the send",
            ],
        ),
        (
            "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 B0.1 B1.1 B2.1 B3.1 B0 B1 B2 B3\n"
            "F0 F0.1 F1 F2 F3 F1.1 F2.1 F3.1 B0.1 B1.1 B2.1 B3.1 B0 B1 B2 B3",
            [
                "stage 0, F3 (action 4): deadlock with blocking sends: its send does not complete: "
                "stage 1 already has 2 unprocessed tensors of this kind and waits at F0.1",
                "stage 1, F0.1 (action 2): deadlock with blocking sends: waits for F0.1 of stage 0",
            ],
        ),
    ],
)
def test_problems_name_stage_action_and_reason(text: str, expected: list[str]) -> None:
    problems = [str(problem) for problem in check_schedule(Schedule.parse(text))]
    assert len(problems) == len(expected), problems
    for told, start in zip(problems, expected, strict=True):
        assert told.startswith(start)


def test_activations_stay_within_the_limit() -> None:
    schedule = generate_schedule("1f1b", 4, 8)
    assert check_schedule(schedule, limit=4) == []
    assert check_schedule(schedule, limit=2) == [
        ScheduleProblem(0, 2, Action("F", 2), "holds activations of 3 micro-batches; the limit is 2"),
        ScheduleProblem(1, 2, Action("F", 2), "holds activations of 3 micro-batches; the limit is 2"),
    ]


def test_a_chunk_counts_as_a_fraction_of_its_stages_activations() -> None:
    schedule = Schedule.parse("F0 F1 F0.1 F1.1 B0.1 B0 B1.1 B1")
    assert check_schedule(schedule, limit=2) == []
    (problem,) = check_schedule(schedule, limit=1.25)
    assert (problem.index, problem.reason) == (2, "holds activations of 1.5 micro-batches; the limit is 1.25")


def test_a_huge_number_gives_a_short_message() -> None:
    assert len(check_schedule(Schedule.parse("F999999.999 B0"))) < 20


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_every_breaking_change_of_a_valid_schedule_is_found(name: str) -> None:
    """Removed and repeated actions are always found, a swap if the simulation blocks."""
    dice = random.Random(3)
    good = generate_schedule(name, 3, 6)
    for _ in range(60):
        stages = [list(actions) for actions in good.stages]
        stage, change = dice.randrange(3), dice.choice(["drop", "double", "swap"])
        actions = stages[stage]
        one, other = dice.sample(range(len(actions)), 2)
        if change == "drop":
            del actions[one]
        elif change == "double":
            actions.insert(other, actions[one])
        else:
            actions[one], actions[other] = actions[other], actions[one]
        problems = check_schedule(Schedule(tuple(map(tuple, stages)), name))
        if change != "swap":
            assert any(problem.stage == stage for problem in problems)
        elif not _comes_to_its_end(stages, good, dice):
            assert problems
            assert "blocking sends" not in problems[0].reason
        else:
            assert all("blocking sends" in problem.reason for problem in problems)


def _comes_to_its_end(stages: list[list[Action]], good: Schedule, dice: random.Random) -> bool:
    """Return True if all actions can run with sends that never block, by running them one at a time."""
    done: set[tuple[str, int, int]] = set()
    at = [0] * len(stages)
    while True:
        ready = []
        for stage, actions in enumerate(stages):
            if at[stage] < len(actions):
                kind, micro_batch, part = (
                    actions[at[stage]].kind,
                    actions[at[stage]].micro_batch,
                    good.part(stage, actions[at[stage]].chunk),
                )
                if kind == "F":
                    free = part == 0 or ("F", micro_batch, part - 1) in done
                elif kind == "W":
                    free = ("back", micro_batch, part) in done
                else:
                    free = ("F", micro_batch, part) in done and (
                        part == good.parts - 1 or ("back", micro_batch, part + 1) in done
                    )
                if free:
                    ready.append((stage, "back" if kind in "BI" else kind, micro_batch, part))
        if not ready:
            return all(place == len(actions) for place, actions in zip(at, stages, strict=True))
        stage, *what = dice.choice(ready)
        done.add(tuple(what))
        at[stage] += 1


def test_schedule_errors_name_file_and_line() -> None:
    text = "# mine\nF0 B0\n\nF0\n"
    problems = check_schedule(Schedule.parse(text))
    assert schedule_error(problems, "mine.txt", stage_lines(text)).problems == (
        "mine.txt:4: stage 1, B0: is missing, as are I0 and W0",
    )
    assert schedule_error(problems).problems[0].startswith("schedule: stage 1, B0: is missing")
