from __future__ import annotations

import pytest

from hpctrain.deck import schedules
from hpctrain.deck.schedules import V_SHAPED
from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.generate import ONE_CHUNK_SCHEDULES, generate_schedule
from hpctrain.pipeline.schedule_check import check_schedule
from hpctrain.pipeline.simulate import peak_activations
from hpctrain.pipeline.v_schedule import LIMITS

NAMES = [*ONE_CHUNK_SCHEDULES, "interleaved", *V_SHAPED]


def test_each_name_has_its_generator() -> None:
    assert (*ONE_CHUNK_SCHEDULES, "interleaved", *LIMITS, "dualpipe-v") == schedules.SCHEDULE_NAMES
    assert tuple(ONE_CHUNK_SCHEDULES) == schedules.ONE_CHUNK


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_schedule_is_valid_and_parses_back(name: str, stages: int) -> None:
    for micro_batches in range(1, 9):
        if name == "interleaved" and micro_batches % stages:
            continue
        schedule = generate_schedule(name, stages, micro_batches)
        assert (schedule.name, schedule.stage_count, schedule.micro_batches) == (name, stages, micro_batches)
        assert check_schedule(schedule) == []
        assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_added_in_the_order_of_micro_batches(name: str) -> None:
    schedule = generate_schedule(name, 4, 8)
    for actions in schedule.stages:
        for chunk in range(schedule.chunks):
            for kinds in ("BI", "BW"):
                order = [it.micro_batch for it in actions if it.kind in kinds and it.chunk == chunk]
                assert order == list(range(8))


def test_schedules_match_their_full_text() -> None:
    def lines(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> list[str]:
        return str(generate_schedule(name, stages, micro_batches, chunks)).splitlines()[1:]

    assert lines("naive", 2, 2) == ["F0 B0 F1 B1"] * 2
    assert lines("gpipe", 2, 2) == ["F0 F1 B0 B1"] * 2
    assert lines("1f1b", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    # Narayanan 2021, figure 4, its lower half for two devices.
    assert lines("interleaved", 2, 4, 2) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


def test_peak_activations_of_each_schedule() -> None:
    assert peak_activations(generate_schedule("naive", 4, 8)) == (1,) * 4
    assert peak_activations(generate_schedule("gpipe", 4, 8)) == (8,) * 4
    assert peak_activations(generate_schedule("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert peak_activations(generate_schedule("1f1b", 4, 2)) == (2, 2, 2, 1)
    # Narayanan 2021: 1 + (p - 1)/(p v) times that of 1F1B on the first stage.
    assert peak_activations(generate_schedule("interleaved", 4, 16, 2))[0] == 4 * (1 + 3 / 8)


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (("1F1B", 2, 2), ["unknown schedule '1F1B' (did you mean '1f1b'?"]),
        (("zebra", 2, 2), ["unknown schedule 'zebra' (use naive, gpipe, 1f1b"]),
        (
            ("gpipe", 0, -1, 0),
            [
                "gpipe: stages = 0: must be from 1",
                "gpipe: micro-batches = -1: must",
                "gpipe: chunks = 0: must",
            ],
        ),
        (("1f1b", 10_000, 1_000_000), ["1f1b: 10000 stages with 1000000 micro-batches exceed the limit"]),
        (("zb-h1", 2, 2, 2), ["zb-h1: chunks = 2: must be 1 (use 'interleaved' for more)"]),
        (("zb-v", 2, 2, 3), ["zb-v: chunks = 3: must be 2"]),
        (
            ("interleaved", 4, 6, 1),
            [
                "interleaved: chunks = 1: must be 2 or more",
                "interleaved: micro-batches = 6: must be a multiple of",
            ],
        ),
        (
            ("interleaved", 4, 3),
            ["interleaved: micro-batches = 3: must be a multiple of the 4 stages (use 4)"],
        ),
    ],
)
def test_all_invalid_arguments_are_reported_at_once(
    arguments: tuple[str, int, int], problems: list[str]
) -> None:
    with pytest.raises(HpctrainError) as raised:
        generate_schedule(*arguments)
    assert len(raised.value.problems) == len(problems)
    for told, expected in zip(raised.value.problems, problems, strict=True):
        assert told.startswith(expected)


def test_an_activation_limit_is_met_or_refused() -> None:
    assert generate_schedule("1f1b", 4, 8, memory_limit=4) == generate_schedule("1f1b", 4, 8)
    with pytest.raises(
        HpctrainError, match="gpipe: stage 0 holds activations of 8 micro-batches; the limit is 4"
    ):
        generate_schedule("gpipe", 4, 8, memory_limit=4)
