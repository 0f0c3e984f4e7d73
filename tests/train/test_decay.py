"""Runs whose rate decays from a checkpoint on: tests of optim/schedule.py in train/run.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import resume, run_deck
from tests.train.test_run import deck_file

__all__ = ["deck_file"]

PEAK, FLOOR = 1e-2, 1e-3
STABLE = [
    "learning_rate.decay=wsd",
    "learning_rate.decay_steps=",
    "run.steps=9",
    "learning_rate.cooldown=2",
    "run.evaluate_every=0",
    "checkpoint.every=3",
    "checkpoint.keep_every=3",
]


def rows(folder: Path, key: str) -> list[float]:
    return [row[key] for row in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.mpi(min_size=1, max_size=2)
def test_the_decay_of_a_wsd_run_begins_at_any_checkpoint(
    world: World, deck_file: Path, mpi_tmp_path: Path
) -> None:
    stable, branch, whole = (mpi_tmp_path / name for name in ("stable", "branch", "whole"))
    assert run_deck(world, deck_file, [*STABLE, f"run.dir={stable}"]) == 0
    ends = ["run.steps=7", "learning_rate.cooldown=4"]
    checkpoint = stable / "checkpoints" / "step-00000003.h5"
    assert resume(world, checkpoint, [f"run.dir={branch}", *ends]) == 0
    assert run_deck(world, deck_file, [*STABLE, *ends, f"run.dir={whole}"]) == 0
    if world.rank == 0:
        assert rows(stable, "lr")[1:] == pytest.approx([PEAK] * 7 + [(PEAK + FLOOR) / 2], rel=1e-12)
        expected = np.interp(range(3, 7), [3, 7], [PEAK, FLOOR])
        assert rows(branch, "lr") == pytest.approx(list(expected), rel=1e-12)
        assert rows(branch, "loss") == rows(whole, "loss")[3:]
        assert "the learning rate" not in (branch / "log.txt").read_text()
    world.everyone.barrier()


@pytest.mark.mpi(max_size=1)
def test_a_wsd_run_goes_on_at_its_peak_and_says_where_it_does_not(
    world: World, deck_file: Path, mpi_tmp_path: Path
) -> None:
    stable, longer = mpi_tmp_path / "stable", mpi_tmp_path / "longer"
    assert run_deck(world, deck_file, [*STABLE, "run.steps=6", f"run.dir={stable}"]) == 0
    checkpoint = stable / "checkpoints" / "step-00000003.h5"
    assert resume(world, checkpoint, [f"run.dir={longer}", "run.steps=8"]) == 0
    assert rows(longer, "lr") == pytest.approx([PEAK] * 4 + [(PEAK + FLOOR) / 2], rel=1e-12)
    assert "the learning rate" not in (longer / "log.txt").read_text()
    assert resume(world, stable, ["run.steps=9"]) == 0
    jumps = "the learning rate rises from 5.50e-03 in step 6 to 1.00e-02 in step 7"
    log = (stable / "log.txt").read_text()
    assert jumps in log and log.index(jumps) < log.index("resumes from")
