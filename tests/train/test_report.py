"""The report of a run that was made, resumed and traced here: what it wrote is found again.

Tests of watch/run_report.py and watch/predicted_vs_measured.py on what train/run.py writes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.report.marks import StepMark
from hpctrain.train.run import resume, run_deck
from hpctrain.watch.run_report import read_runs, write_report
from tests.train.test_run import deck_file
from tests.train.test_step_seconds import QUICK, rates

__all__ = ["deck_file"]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_run_that_went_on_is_told_of(world: World, deck_file: Path, mpi_tmp_path: Path) -> None:
    folder = mpi_tmp_path / "run"
    pipeline = ("layout.pipeline=2", "layout.schedule=1f1b", "run.trace=true")
    keys = [f"run.dir={folder}", *QUICK, *pipeline, rates(world, mpi_tmp_path)]
    assert run_deck(world, deck_file, keys) == 0
    assert resume(world, folder, ["run.steps=8"]) == 0
    if world.rank:
        return
    (run,) = read_runs([folder])
    assert run.problems == []
    newest = folder / "checkpoints" / "step-00000004.h5"
    assert list(run.marks) == [StepMark(4, "resumed", f"resumes from {newest} at step 4")]
    assert [(event.step, event.kind) for event in run.events] == [(4, "resumed")]
    assert (run.state, run.facts["ranks"], run.deck["layout.pipeline"]) == ("done", "2", "2")
    assert [(kept.path.name, kept.note) for kept in run.checkpoints] == [
        ("step-00000008.h5", "latest"),
        ("step-00000004.h5", ""),
    ]
    assert [(each.first_step, each.last_step) for each in run.history] == [(1, 4), (5, 8)]
    assert run.step is not None
    assert run.step.schedule.stage_count == 2
    told = {each.heading: each.pairs for each in run.comparisons}
    assert len(told) == 4
    for stage in (0, 1):
        pairs = {pair.words: pair for pair in told[f"Memory of a rank of stage {stage}"]}
        assert pairs["parameters"].predicted == pairs["parameters"].measured
        assert pairs["optimizer"].predicted == pairs["optimizer"].measured
    *causes, whole = told["Step time"]
    assert sum(pair.measured or 0.0 for pair in causes) == pytest.approx(whole.measured, rel=0.01)
    # The plan and the ledger of the last four steps agree to the byte.
    sent = told["Bytes that a rank sends and receives per step, by axis"]
    assert [pair.words for pair in sent] == ["pipeline", "world", "all axes"]
    assert all(pair.predicted == pair.measured for pair in sent), sent
    assert write_report([folder], mpi_tmp_path / "report.html") > 50_000
