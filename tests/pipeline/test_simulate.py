from __future__ import annotations

import math

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Schedule, accumulation
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.simulate import StageTimes, peak_activations, simulate


def test_two_stages_match_a_manual_calculation() -> None:
    schedule = Schedule.parse("F0 F1 I0 W0 I1 W1\nF0 I0 F1 I1 W0 W1")
    simulation = simulate(schedule, StageTimes(2, 3, 1, 0.5))
    assert simulation.start == ((0, 2, 8, 11, 13, 16), (2.5, 4.5, 7.5, 9.5, 12.5, 13.5))
    assert simulation.end == ((2, 4, 11, 12, 16, 17), (4.5, 7.5, 9.5, 12.5, 13.5, 14.5))
    assert simulation.cost == simulation.finish == 17
    assert simulation.ideal == 12
    assert simulation.bubble_rate == pytest.approx(5 / 17)
    assert simulation.idle == (5, 5)
    assert simulation.peak_activations == (2, 2)


def test_cost_is_the_longest_span_of_a_stage_not_the_finish() -> None:
    # Stage 1 starts late and ends last.
    simulation = simulate(Schedule.parse("F0 I0 W0\nF0 I0 W0"), StageTimes(1, 1, 5))
    assert (simulation.cost, simulation.finish) == (9, 9)
    simulation = simulate(Schedule.parse("F0 I0 W0\nF0 I0 W0"), StageTimes(1, 1, (1, 9)))
    assert (simulation.cost, simulation.finish) == (11, 12)


def test_a_v_placement_has_no_communication_on_the_last_stage() -> None:
    schedule = Schedule.parse("# v: 2 stages, 1 micro-batch, 2 chunks, v\nF0 F0.1 B0.1 B0\nF0 F0.1 B0.1 B0")
    simulation = simulate(schedule, StageTimes(2, 2, 2, 10))
    assert simulation.start == ((0, 23, 24, 50), (11, 12, 36, 38))
    assert simulation.peak_activations == (1, 1)


def test_chunks_share_the_time_of_their_stage() -> None:
    schedule = generate_schedule("interleaved", 2, 4)
    alike = simulate(schedule, StageTimes(6, 4, 2, 1))
    assert alike == simulate(schedule, StageTimes((6, 6), (4, 4), (2, 2), (1, 1, 1)))
    assert alike == simulate(schedule, StageTimes((3,) * 4, (2,) * 4, (1,) * 4, 1))
    assert alike.ideal == 4 * 12


def test_the_slowest_stage_sets_the_ideal_time() -> None:
    simulation = simulate(
        generate_schedule("1f1b", 4, 8), StageTimes((1, 1, 3, 1), (1, 1, 3, 1), (1, 1, 3, 1))
    )
    assert simulation.ideal == 8 * 9
    assert simulation.idle == tuple(simulation.cost - 8 * work for work in (3, 3, 9, 3))


def test_one_stage_has_no_bubble() -> None:
    simulation = simulate(accumulation(7), StageTimes(0.1, 0.3, 0.7, 5))
    assert (simulation.bubble_rate, simulation.peak_activations) == (pytest.approx(0, abs=1e-12), (1,))
    assert simulation.bubble_rate >= 0


def test_zero_times_have_no_bubble() -> None:
    assert simulate(accumulation(1), StageTimes(0, 0, 0)).bubble_rate == 0


# Qi and others, arXiv 2401.10241, tables 4 and 5: T_F, T_B, T_W, T_comm in ms; 8 stages, 24 micro-batches.
SMALL, LARGE = StageTimes(18.522, 18.086, 9.337, 0.601), StageTimes(29.718, 29.444, 19.927, 0.527)


@pytest.mark.parametrize(
    ("name", "times", "published"),
    [
        ("1f1b", SMALL, 0.2431),
        ("zb-h1", SMALL, 0.1585),
        ("zb-h2", SMALL, 0.1083),
        ("1f1b", LARGE, 0.2347),
        ("zb-h1", LARGE, 0.1323),
        ("zb-h2", LARGE, 0.0698),
    ],
)
def test_published_bubble_rates(name: str, times: StageTimes, published: float) -> None:
    assert round(simulate(generate_schedule(name, 8, 24), times).bubble_rate, 4) == published


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("times", [StageTimes(6, 6, 6), StageTimes(12, 18, 6)])
def test_closed_forms_of_the_bubble(stages: int, rounds: int, times: StageTimes) -> None:
    micro_batches = stages * rounds
    for name, chunks in [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]:
        simulation = simulate(generate_schedule(name, stages, micro_batches, chunks), times)
        assert simulation.cost * micro_batches * chunks == simulation.ideal * (
            micro_batches * chunks + stages - 1
        )


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 9])
def test_bubble_of_1f1b_and_gpipe_with_any_number_of_micro_batches(micro_batches: int) -> None:
    for name in ("gpipe", "1f1b"):
        simulation = simulate(generate_schedule(name, 4, micro_batches), StageTimes(2, 3, 1))
        assert simulation.cost / simulation.ideal - 1 == pytest.approx(3 / micro_batches)


def test_naive_keeps_one_stage_busy_at_a_time() -> None:
    simulation = simulate(generate_schedule("naive", 4, 5), StageTimes(1, 1, 1))
    assert simulation.cost == 4 * simulation.ideal


def test_activations_live_to_the_end_of_the_weight_gradient() -> None:
    assert peak_activations(Schedule.parse("F0 I0 F1 I1 W0 W1")) == (2,)
    assert peak_activations(Schedule.parse("F0 I0 W0 F1 I1 W1")) == (1,)
    assert peak_activations(Schedule.parse("F0 F0.1 F1 B0.1 B0 F1.1 B1.1 B1")) == (1.5,)


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        (StageTimes((1, 2, 3)), "times: forward: expected 1, 2 or 4 numbers, got 3"),
        (StageTimes(weight_gradient=(1,)), "times: weight gradient: expected 1, 2 or 4 numbers"),
        (StageTimes(communication=(1, 2)), "times: communication: expected 1 or 3 numbers, got 2"),
    ],
)
def test_times_of_wrong_length_are_refused(times: StageTimes, problem: str) -> None:
    with pytest.raises(HpctrainError, match=problem):
        simulate(generate_schedule("interleaved", 2, 2), times)


def test_negative_or_non_finite_times_are_refused() -> None:
    with pytest.raises(HpctrainError) as raised:
        StageTimes(-1, math.nan, (1, math.inf))
    assert raised.value.problems == (
        "times: forward = -1: must be a number of at least 0",
        "times: input gradient = nan: must be a number of at least 0",
        "times: weight gradient = inf: must be a number of at least 0",
    )


def test_a_deadlocking_schedule_is_refused() -> None:
    with pytest.raises(HpctrainError, match="schedule: stage 0 never starts B0, because"):
        simulate(Schedule.parse("F0 B0\nB0 F0"), StageTimes())
