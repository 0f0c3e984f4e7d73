"""Seconds of a run's steps: planned before, measured after by cause, and nothing of the run changed by that.

Tests of train/step_seconds.py, and of what train/run.py and train/memory_ledger.py make of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm.timeline import PHASES, SCHEDULE
from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.errors import EXIT_USER, HpctrainError
from hpctrain.plan.time.deck_rates import deck_rates
from hpctrain.plan.time.measured_step import TOGETHER
from hpctrain.plan.time.step_plan import plan_step
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import resume, run_deck
from hpctrain.train.step_seconds import MAX_RECORDS
from tests.plan.time.test_machine_rates import FILE
from tests.train.test_run import contents, deck_file

__all__ = ["deck_file"]

LAYOUTS = {
    "tensor": (2, ("layout.tensor=2",), "tensor"),
    "recompute": (2, ("layout.tensor=2", "memory.recompute=full"), "recompute"),
    "pipeline": (2, ("layout.pipeline=2", "layout.schedule=1f1b"), "stages"),
    "traced": (2, ("layout.pipeline=2", "layout.schedule=1f1b", "run.trace=true"), "bubble"),
    "zero": (2, ("layout.zero=1",), "gradients"),
    "cut": (2, ("layout.zero=3",), "parameters"),
    "context": (2, ("layout.context=2",), "context"),
    "alone": (1, (), "computing"),
}
QUICK = (
    "run.steps=4",
    "run.evaluate_every=0",
    "batch.ramp_from=0",
    "batch.ramp_steps=0",
    "checkpoint.every=4",
)


def rates(world: World, folder: Path) -> str:
    """A file of a machine, and the key of a deck that names it. Collective."""
    if world.rank == 0:
        (folder / "ours.toml").write_text(FILE)
    world.everyone.barrier()
    return f"machine.rates={folder / 'ours.toml'}"


def planned(folder: Path) -> dict[str, Any]:
    """What a run has written of its seconds."""
    return dict(json.loads((folder / "plan.json").read_text(encoding="utf-8"))["time"])


def traced(path: Path, rank: int) -> tuple[float, float]:
    """Seconds of a rank's actions, and of its phases forward and backward, in the mean of the three steps
    that a trace holds: the same ones that are measured.
    """
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["pid"] == rank]
    spans = [(event["cat"], event["name"], event["dur"] * 1e-6) for event in events if event["ph"] == "X"]
    actions = sum(seconds for row, _, seconds in spans if row == SCHEDULE)
    passes = sum(seconds for row, name, seconds in spans if row == PHASES and name in {"forward", "backward"})
    return actions / 3, passes / 3


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_measured_causes_are_the_whole_step(
    world: World, deck_file: Path, mpi_tmp_path: Path, layout: str
) -> None:
    ranks, layout_keys, shown = LAYOUTS[layout]
    if ranks != world.size:
        pytest.skip(f"for {ranks} ranks")
    folder = mpi_tmp_path / "run"
    keys = [f"run.dir={folder}", *QUICK, *layout_keys, rates(world, mpi_tmp_path)]
    assert run_deck(world, deck_file, keys) == 0
    if world.rank:
        return
    time = planned(folder)
    deck = read_deck(folder / "deck.toml", [f"machine.ranks_per_node={world.size}"])
    machine = deck_rates(deck)
    assert machine is not None
    assert deck.model.vocabulary is not None
    step = plan_step(deck, world.size, deck.model.vocabulary, machine)
    assert time["predicted"] == json.loads(json.dumps(step.row()))
    assert (time["machine"], time["stage"]) == ("ours", step.stage)
    measured = time["measured"]
    causes = measured["seconds_by_cause"]
    assert sum(causes.values()) == pytest.approx(measured["seconds"])
    assert all(seconds >= 0 for seconds in causes.values()), causes
    assert causes["computing"] > 0 < causes["update"]
    assert causes[shown] > 0
    stages = 2 if "layout.pipeline=2" in layout_keys else 1
    assert measured["steps"] == 3
    assert measured["ranks"] == world.size // stages
    alone = {"tensor", "context", "expert", "recompute", "stages"} & set(causes)
    if layout != "recompute":
        assert {name for name in alone if causes[name] > 0} <= {shown, "gradients"}
    assert ("stages" in causes) == (layout != "traced")
    if layout == "traced":
        actions, passes = traced(folder / "trace.json", step.stage)
        assert actions <= causes["computing"] <= passes
    log = (folder / "log.txt").read_text()
    assert "predicted step time: " in log
    assert "Predicted: from the rates" in log


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_that_is_planned_has_the_same_bits(world: World, deck_file: Path, mpi_tmp_path: Path) -> None:
    layout = ["layout.pipeline=2", "memory.recompute=full", "run.trace=true"] if world.size > 1 else []
    plain, watched = mpi_tmp_path / "plain", mpi_tmp_path / "watched"
    assert run_deck(world, deck_file, [f"run.dir={plain}", *QUICK, *layout]) == 0
    assert (
        run_deck(world, deck_file, [f"run.dir={watched}", *QUICK, *layout, rates(world, mpi_tmp_path)]) == 0
    )
    if world.rank == 0:
        name = "checkpoints/step-00000004.h5"
        there, here = contents(plain / name), contents(watched / name)
        assert there.keys() == here.keys()
        assert all(values.tobytes() == here[key].tobytes() for key, values in there.items())
        assert "time" not in json.loads((plain / "plan.json").read_text())
        assert "Predicted: from the rates" not in (plain / "log.txt").read_text()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_goes_on_without_its_file(world: World, deck_file: Path, mpi_tmp_path: Path) -> None:
    folder = mpi_tmp_path / "run"
    keys = [f"run.dir={folder}", *QUICK, rates(world, mpi_tmp_path)]
    assert run_deck(world, deck_file, keys) == 0
    assert resume(world, folder, ["run.steps=6"]) == 0
    if world.rank == 0:
        assert planned(folder)["measured"]["steps"] == 1  # the first one of a job is left out
        (mpi_tmp_path / "ours.toml").unlink()
    world.everyone.barrier()
    assert resume(world, folder, ["run.steps=8"]) == 0
    if world.rank == 0:
        assert "time" not in json.loads((folder / "plan.json").read_text())
        log = (folder / "log.txt").read_text()
        assert "the step time is not predicted:" in log
        assert "ours.toml" in log.split("the step time is not predicted:")[1]
    with pytest.raises(HpctrainError, match=r"machine\.rates=nowhere\.toml: cannot be read"):
        resume(world, folder, ["run.steps=10", "machine.rates=nowhere.toml"])


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize(
    ("named", "said"), [("gone.toml", "cannot be read"), ("selene-2021", "products.fp32")]
)
def test_a_run_is_refused_before_it_has_written(
    world: World, deck_file: Path, mpi_tmp_path: Path, named: str, said: str
) -> None:
    folder = mpi_tmp_path / "run"
    with pytest.raises(HpctrainError, match=said) as raised:
        run_deck(world, deck_file, [f"run.dir={folder}", *QUICK, f"machine.rates={named}"])
    assert raised.value.exit_code == EXIT_USER
    assert (
        raised.value.problems[0].startswith(f"machine.rates={named}: ") or "--set" in raised.value.problems[0]
    )
    assert not folder.exists()


@pytest.mark.mpi(max_size=1)
def test_what_is_kept_does_not_grow(world: World, deck_file: Path, mpi_tmp_path: Path) -> None:
    """Steps of a ramp are of another size than those that are planned, and do not count."""
    folder = mpi_tmp_path / "run"
    keys = [f"run.dir={folder}", "run.steps=9", "run.evaluate_every=0", "checkpoint.every=9"]
    ramp = ["batch.ramp_from=4", "batch.ramp_steps=6"]
    assert run_deck(world, deck_file, [*keys, *ramp, rates(world, mpi_tmp_path)]) == 0
    whole = sum(row["batch"] == 8 for row in read_metrics(folder / "metrics.jsonl"))
    assert 0 < planned(folder)["measured"]["steps"] <= whole < 9 < MAX_RECORDS
    assert set(TOGETHER) <= set(planned(folder)["measured"]["seconds_by_cause"])
