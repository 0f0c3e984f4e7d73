"""Runs whose deck leaves the layout open.

Tests of train/automatic_layout.py, and of what train/run.py makes of it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.errors import HpctrainError
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import resume, run_deck
from tests.plan.time.test_machine_rates import FILE
from tests.train.test_run import contents, deck_file

__all__ = ["deck_file"]

QUICK = ("run.steps=2", "run.evaluate_every=0", "checkpoint.every=0")


@pytest.fixture
def rates(mpi_tmp_path: Path, world: World) -> Path:
    path = mpi_tmp_path / "machine.toml"
    if world.rank == 0:
        path.write_text(FILE)
    world.everyone.barrier()
    return path


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_run_has_the_chosen_layout_and_the_bits_of_one_that_gives_it(
    world: World, deck_file: Path, mpi_tmp_path: Path, rates: Path
) -> None:
    opened, given = mpi_tmp_path / "opened", mpi_tmp_path / "given"
    # Whatever the process holds by itself: what fits is not the matter here.
    keys = ["layout=auto", "machine.memory=64 GB", "batch.micro_size=", f"machine.rates={rates}", *QUICK]
    assert run_deck(world, deck_file, [*keys, f"run.dir={opened}"]) == 0
    chosen = read_deck(opened / "deck.toml", ranks=world.size)
    assert not chosen.layout.auto and {"layout.tensor", "batch.micro_size"} <= set(chosen.layout.chosen)
    assert run_deck(world, opened / "deck.toml", [f"run.dir={given}"]) == 0
    newest = Path("checkpoints") / "step-00000002.h5"
    one, other = contents(opened / newest), contents(given / newest)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    # Chosen anew, where a run goes on.
    assert resume(world, opened, ["layout=auto", "run.steps=3"]) == 0
    if world.rank == 0:
        assert [row["step"] for row in read_metrics(opened / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_all_ranks_refuse_what_has_no_rates(world: World, deck_file: Path, mpi_tmp_path: Path) -> None:
    with pytest.raises(HpctrainError, match=r"--set layout=auto: requires machine\.rates"):
        run_deck(world, deck_file, ["layout=auto", f"run.dir={mpi_tmp_path / 'none'}"])
    assert not (mpi_tmp_path / "none").exists()
