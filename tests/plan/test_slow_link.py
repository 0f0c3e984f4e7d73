"""Seconds over a link, worked out by hand, and the speed at which less traffic breaks even."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest

from hpctrain.comm.transports.traffic import Traffic
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.plan.slow_link import break_even, linked_step, measured_step
from hpctrain.plan.traffic_plan import PlannedTransfer, StageTraffic, TrafficPlan
from hpctrain.units import Link

LINK = Link(100.0, 0.5)


def plan(*steps: tuple[PlannedTransfer, ...], micro_batches: int = 1) -> TrafficPlan:
    return TrafficPlan((StageTraffic(0, steps),), micro_batches, True)


def moved(count: int, begun: float | None = None, rounds: int = 0) -> PlannedTransfer:
    return PlannedTransfer("data", count, Traffic(count, count, rounds), begun)


def test_what_is_waited_for_adds_up() -> None:
    assert linked_step(plan((moved(200), moved(100, rounds=2))), LINK, 6.0).seconds == 6.0 + 2.0 + 1.0 + 1.0


def test_what_is_started_moves_in_backward() -> None:
    """Of six seconds the last four: a bucket at half of them, one at their end."""
    assert linked_step(plan((moved(100, 0.5), moved(100, 1.0))), LINK, 6.0).seconds == 6.0 + 1.0
    # The second waits for the first, which is longer than what is left of backward.
    assert linked_step(plan((moved(300, 0.5), moved(100, 1.0))), LINK, 6.0).seconds == 6.0 + 2.0
    assert linked_step(plan((moved(100, 0.5),)), LINK, 6.0).moving == 0.0
    # Of two micro-batches that of the last alone.
    assert linked_step(plan((moved(300, 0.5),), micro_batches=2), LINK, 6.0).moving == 2.0


def test_what_replicas_start_has_whole_steps_to_move() -> None:
    assert linked_step(plan((moved(1300, 1.0)._replace(ahead=2),)), LINK, 6.0).moving == 1.0
    assert linked_step(plan((moved(1100, 1.0)._replace(ahead=2),)), LINK, 6.0).moving == 0.0


def test_steps_that_differ_count_by_their_mean_and_stages_by_the_slowest() -> None:
    assert linked_step(plan((moved(400),), (), (), ()), LINK, 1.0).moving == 1.0
    both = TrafficPlan((StageTraffic(0, ((),)), StageTraffic(1, ((moved(100),),))), 1, True)
    assert linked_step(both, LINK, 1.0).moving == 1.0


def test_less_traffic_breaks_even_where_its_cost_is_the_time_that_it_saves() -> None:
    exact, less = plan((moved(1000),)), plan((moved(200),))
    speed = break_even(exact, less, 0.0, (6.0, 6.5))
    assert speed == pytest.approx(800 / 0.5)
    assert break_even(exact, less, 0.0, (6.0, 6.0)) == inf
    assert break_even(less, exact, 0.0, (6.0, 6.0)) is None


def write_run(folder: Path, seconds: list[float], **more: object) -> Path:
    folder.mkdir()
    rows = [{"step": step, "seconds": taken} | more for step, taken in enumerate(seconds, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "deck.toml").write_text(
        '[run]\nsteps = 5\n[model]\nfamily = "gpt2"\nlayers = 1\nhidden = 8\nheads = 1\n'
        '[data]\ntokens = "none"\n[batch]\nglobal_size = 2\nmicro_size = 1\nsequence = 8\n'
        "[learning_rate]\npeak = 1e-3\n"
    )
    return folder


def test_a_step_is_measured_by_a_run(tmp_path: Path) -> None:
    deck, seconds = measured_step(write_run(tmp_path / "run", [9.0, 9.0, 9.0, 1.0, 3.0, 2.0]))
    assert (deck.model.hidden, seconds) == (8, 2.0)
    with pytest.raises(InputOutputError, match="has 3 steps; more than 3 are required"):
        measured_step(write_run(tmp_path / "short", [1.0, 1.0, 1.0]))
    slowed = write_run(tmp_path / "slowed", [1.0] * 9, emulated_link="1 Mbit/s")
    with pytest.raises(HpctrainError, match="are those of an emulated link"):
        measured_step(slowed)
