"""V-shaped schedules: complete, and with the activations and bubbles of the papers.

Also tests of pipeline/list_scheduling.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.pipeline import v_schedule
from hpctrain.pipeline.action import Action, Schedule
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.schedule_check import check_schedule
from hpctrain.pipeline.simulate import StageTimes, simulate

ALIKE = StageTimes()
# Measured by the zero-bubble paper on models of 1.5B and 6.2B parameters, milliseconds.
SMALL = StageTimes(18.522, 18.086, 9.337, 0.601)
LARGE = StageTimes(29.718, 29.444, 19.927, 0.527)
UNEVEN = StageTimes([1 + part % 3 for part in range(8)], 1, [0.1 * part for part in range(8)], 0.1)
NAMES = ("zb-v", "v-half", "v-min", "dualpipe-v")


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the search to few candidates, for tests in which any schedule will do."""
    monkeypatch.setattr(v_schedule, "_MAX_CANDIDATES", 12)


def most_activations(name: str, stages: int) -> float:
    """Return the values of the papers' tables, in micro-batches of a whole stage."""
    return {
        "zb-v": stages,
        "v-half": (stages + 2) // 2,
        "v-min": (stages + 4) // 3,
        "dualpipe-v": stages + 0.5,
    }[name]


def bubble(name: str, stages: int, micro_batches: int, times: StageTimes = ALIKE) -> float:
    simulation = simulate(generate_schedule(name, stages, micro_batches, times=times), times)
    return simulation.cost - simulation.ideal


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
def test_v_schedules_are_complete_and_within_the_papers_activations(name: str, stages: int) -> None:
    limit = most_activations(name, stages)
    for micro_batches in sorted({1, stages, 2 * stages - 1, 4 * stages} if stages < 6 else {3, 2 * stages}):
        schedule = generate_schedule(name, stages, micro_batches)
        assert (schedule.name, schedule.placement, schedule.chunks) == (name, "v", 2)
        assert (schedule.stage_count, schedule.micro_batches) == (stages, micro_batches)
        assert check_schedule(schedule, limit) == []
        assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "times", [SMALL, LARGE, UNEVEN, StageTimes(1, 2, 0, 3), StageTimes(0, 0, 0, 0), StageTimes(1, 1, 4, 0.5)]
)
def test_v_schedules_are_valid_for_any_times(name: str, times: StageTimes) -> None:
    for micro_batches in (2, 9):
        schedule = generate_schedule(name, 4, micro_batches, times=times)
        assert check_schedule(schedule, most_activations(name, 4)) == []


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_added_in_the_order_of_micro_batches(name: str) -> None:
    """Therefore all schedules give the same gradients, bit for bit."""
    for actions in generate_schedule(name, 4, 9, times=SMALL).stages:
        for chunk, kinds in itertools.product((0, 1), ("F", "BI", "BW")):
            order = [a.micro_batch for a in actions if a.chunk == chunk and a.kind in kinds]
            assert order == list(range(9))


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8, 16])
def test_zb_v_has_no_bubble_for_equal_times(stages: int) -> None:
    for micro_batches in (2 * stages, 2 * stages + 1, 4 * stages):
        assert bubble("zb-v", stages, micro_batches) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("stages", [3, 4])
def test_v_half_and_v_min_have_a_fraction_of_the_bubble_of_1f1b(stages: int) -> None:
    """The paper states about p / 2m and 2p / 3m, where 1F1B has p / m; no more with more micro-batches."""
    plain = bubble("1f1b", stages, 4 * stages)
    assert plain == pytest.approx(3 * (stages - 1))
    assert bubble("v-half", stages, 4 * stages) <= 0.5 * plain
    assert bubble("v-min", stages, 4 * stages) <= 0.67 * plain


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "times", "known"), [("zb-v", LARGE, 0.0446), ("v-half", SMALL, 0.1719), ("v-min", LARGE, 0.2061)]
)
def test_v_schedules_beat_1f1b_with_published_times(name: str, times: StageTimes, known: float) -> None:
    """ZB-V is also better than ZB-H2, with half of its activations. `known` is what this search finds."""
    plain, h2, found = (
        simulate(generate_schedule(other, 8, 24, times=times), times) for other in ("1f1b", "zb-h2", name)
    )
    assert found.bubble_rate < plain.bubble_rate
    assert found.bubble_rate <= known + 5e-5
    assert max(found.peak_activations) <= most_activations(name, 8)
    if name == "zb-v":
        assert found.bubble_rate < h2.bubble_rate
        assert max(found.peak_activations) == 8
        assert max(h2.peak_activations) == 15


@pytest.mark.parametrize("stages", [2, 4, 5])
@pytest.mark.parametrize("times", [ALIKE, StageTimes(2, 2, 1), StageTimes(4, 4, 1)])
def test_bubble_and_activations_of_dualpipe_v(stages: int, times: StageTimes) -> None:
    """Parts of the model take half of a stage's time; F = I, and B = I + W."""
    forward, weight = times.forward / 2, times.weight_gradient / 2
    backward = forward + weight
    for micro_batches in (2 * stages, 2 * stages + 3):
        simulation = simulate(generate_schedule("dualpipe-v", stages, micro_batches), times)
        assert simulation.finish - simulation.ideal == pytest.approx(
            (stages - 1) * (forward + backward - 2 * weight)
        )
        assert max(simulation.peak_activations) == (2 * stages + 1) / 2


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("forward", "weight", "together"), [(1, 1, 3), (2, 1, 5), (2, 2, 4.8), (4, 1, 7.2), (3, 2, 8)]
)
def test_bubble_of_dualpipe_v_is_deepseeks_where_pairs_end_together(
    stages: int, forward: float, weight: float, together: float
) -> None:
    """DeepSeek's table has, for PP = 2 p parts, (PP/2 - 1)(F&B + B - 3W)."""
    schedule = generate_schedule("dualpipe-v", stages, 3 * stages)
    finish, work = run_in_pairs(schedule, forward, weight, together)
    expected = (stages - 1) * (together + (forward + weight) - 3 * weight)
    assert finish - work == pytest.approx(expected)


def run_in_pairs(schedule: Schedule, forward: float, weight: float, together: float) -> tuple[float, float]:
    """Return end of the step and least work of a stage, if F and the B after it are one action."""
    duration = {"F": forward, "I": forward, "W": weight, "B": forward + weight}
    last = schedule.parts - 1
    pieces = [list(in_pairs(schedule, stage)) for stage in range(schedule.stage_count)]
    lengths = [[together if len(p) == 2 else duration[p[0].kind] for p in stage] for stage in pieces]
    end: dict[tuple[bool, int, int], float] = {}
    now, done = [0.0] * schedule.stage_count, [0] * schedule.stage_count
    while any(done[stage] < len(pieces[stage]) for stage in range(schedule.stage_count)):
        before = list(done)
        for stage in range(schedule.stage_count):
            for piece, length in list(zip(pieces[stage], lengths[stage], strict=True))[done[stage] :]:
                results = [(a.kind == "F", schedule.part(stage, a.chunk), a) for a in piece if a.kind != "W"]
                needs = [
                    (True, part - 1 if is_forward else part, action.micro_batch)
                    if is_forward or part == last
                    else (False, part + 1, action.micro_batch)
                    for is_forward, part, action in results
                    if not (is_forward and part == 0)
                ]
                if any(need not in end for need in needs):
                    break
                now[stage] = max([now[stage], *(end[need] for need in needs)]) + length
                end.update({(is_forward, part, a.micro_batch): now[stage] for is_forward, part, a in results})
                done[stage] += 1
        assert done != before, "no deadlock"
    return max(now), min(map(sum, lengths))


def in_pairs(schedule: Schedule, stage: int) -> Iterator[tuple[Action, ...]]:
    """Group actions into overlapped pairs. The last stage has nothing to overlap with its first backward."""
    left, single = list(schedule.stages[stage]), stage == schedule.stage_count - 1
    while left:
        action = left.pop(0)
        if action.kind == "F" and left and left[0].kind == "B" and not single:
            yield action, left.pop(0)
        else:
            single = single and action.kind != "B"
            yield (action,)


def test_dualpipe_v_of_two_stages() -> None:
    schedule = generate_schedule("dualpipe-v", 2, 4)
    expected = (
        "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 F3 B1.1 F2.1 B0 B2.1 F3.1 B1 B3.1 I2 W2 I3 W3",
        "F0 F0.1 F1 F1.1 F2 B0.1 F2.1 B0 F3 B1.1 F3.1 B1 B2.1 B2 I3.1 I3 W3.1 W3",
    )
    assert tuple(" ".join(map(str, actions)) for actions in schedule.stages) == expected


def test_v_schedules_meet_a_limit_and_improve_with_more_memory() -> None:
    costs = []
    for limit in (1, 1.5, 2.9, 6):
        schedule = generate_schedule("zb-v", 4, 6, times=SMALL, memory_limit=limit)
        assert check_schedule(schedule, limit) == []
        costs.append(simulate(schedule, SMALL).cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.5 * costs[0]


def test_a_limit_below_one_micro_batch_is_refused() -> None:
    with pytest.raises(
        HpctrainError, match="v-min: the limit of activations of 0\\.5 micro-batches must be 1 or more"
    ):
        generate_schedule("v-min", 4, 8, memory_limit=0.5)
    with pytest.raises(HpctrainError, match=r"dualpipe-v: stage \d holds activations of 4\.5"):
        generate_schedule("dualpipe-v", 4, 8, memory_limit=4)


def test_times_of_wrong_length_are_refused() -> None:
    with pytest.raises(HpctrainError, match="forward: expected 1, 4 or 8 numbers"):
        generate_schedule("zb-v", 4, 8, times=StageTimes([1, 2, 3]))


@pytest.mark.usefixtures("short_search")
def test_the_search_is_deterministic() -> None:
    assert generate_schedule("v-half", 5, 11, times=SMALL) == generate_schedule("v-half", 5, 11, times=SMALL)


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", NAMES)
def test_schedules_of_many_stages(name: str) -> None:
    schedule = generate_schedule(name, 16, 40, times=LARGE)
    assert check_schedule(schedule, most_activations(name, 16)) == []
    assert sum(action.kind == "F" for actions in schedule.stages for action in actions) == 16 * 40 * 2
    assert Action("F", 39, 1) in schedule.stages[0]
