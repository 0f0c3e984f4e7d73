"""Comparison of planned with measured steps: its output, and the benchmark itself with a tiny deck."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpctrain.bench import plan_accuracy as bench
from hpctrain.bench.plan_accuracy import (
    DECKS,
    RANKS,
    PlannedStep,
    bench_plan,
    deck_named,
    json_results,
    regrets,
    result_lines,
)
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.plan.time.machine_rates import parse_machine
from hpctrain.plan.time.step_plan import plan_step
from tests.engines import small_deck
from tests.plan.time.test_machine_rates import FILE

BF16 = "\n[machine.products.bf16]\npeak = 2e11\nefficiency = 0.8\nsaturation = 100.0\n"


def row(name: str, planned: float, measured: float) -> PlannedStep:
    return PlannedStep(name, planned, {"products": planned}, measured, measured, measured, {})


ROWS = [
    row("17m-fp32-data", 1.1, 1.0),
    row("17m-fp32-tensor", 1.0, 1.2),
    row("17m-bf16-data", 0.5, 0.5),
    row("124m-fp32-data", 4.0, 4.0),
    row("124m-fp32-zero-3", 5.0, 4.5),
]


def test_decks_are_twelve_that_two_ranks_can_train() -> None:
    machine = parse_machine(FILE + BF16, "")
    assert len(DECKS) == 12
    by_model: dict[str, set[tuple[int, int]]] = {}
    for name in DECKS:
        deck = deck_named(name)
        assert plan_step(deck, RANKS, deck.model.vocabulary or 0, machine).seconds > 0
        parameters = count(ModelShape.of(deck, deck.model.vocabulary or 0)).parameters
        batch = deck.batch.global_size * deck.batch.sequence
        by_model.setdefault(name.split("-")[0], set()).add((parameters, batch))
        assert name.split("-")[1] == deck.precision.compute
    assert {name: len(kinds) for name, kinds in by_model.items()} == {"17m": 1, "124m": 1}
    schedules = {deck_named(name).layout.schedule for name in DECKS if deck_named(name).layout.pipeline > 1}
    assert len(schedules) == 3


def test_regret_is_what_the_best_by_plan_takes_beyond_the_best() -> None:
    found = regrets(ROWS)
    assert found == pytest.approx({"17m-fp32": 0.2, "124m-fp32": 0.0})
    assert regrets([ROWS[2]]) == {}


def test_figures_and_lines_tell_how_far_off_plans_are() -> None:
    machine = parse_machine(FILE, "")
    told = json_results(ROWS, machine)
    assert told["mean_off"] == pytest.approx((0.1 + 1 / 6 + 0 + 0 + 1 / 9) / 5)
    assert told["largest_off"] == pytest.approx(1 / 6)
    lines = "\n".join(result_lines(ROWS, machine))
    assert "-16.7%" in lines
    assert "Mean absolute deviation 7.6%, largest 16.7%" in lines
    assert "17m-fp32 20.0%, 124m-fp32 0.0%" in lines


@pytest.mark.mpi(min_size=2, max_size=2)
def test_steps_are_planned_and_measured(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(bench, "deck_named", lambda name: small_deck(*DECKS[name]))
    file, out = mpi_tmp_path / "ours.toml", mpi_tmp_path / "figures.json"
    if world.rank == 0:
        file.write_text(FILE + BF16)
    world.everyone.barrier()
    names = ("17m-fp32-data", "17m-fp32-1f1b", "124m-bf16-tensor")
    bench_plan(world, str(file), names, 1, 2, out)
    world.everyone.barrier()
    rows = json.loads(out.read_text())["rows"]
    assert [each["name"] for each in rows] == list(names)
    for each in rows:
        assert each["planned"] == pytest.approx(sum(each["causes"].values()))
        assert 0 < each["lowest"] <= each["measured"] <= each["highest"]
    assert rows[1]["causes"]["bubble"] > 0 < rows[2]["causes"]["tensor"]
    assert ("17m-fp32-1f1b" in capsys.readouterr().out) == (world.rank == 0)
    with pytest.raises(HpctrainError, match=r"--only nothing: must be 17m-fp32-data, "):
        bench_plan(world, str(file), ("nothing",), 1, 1, None)
    torch.set_num_threads(threads)


def test_one_rank_is_refused(world: World) -> None:
    with pytest.raises(
        HpctrainError, match=r"bench plan: requires 2 ranks \(mpirun -n 2 hpctrain bench plan"
    ):
        bench_plan(world.single_rank_world(), None, (), 1, 1, None)
