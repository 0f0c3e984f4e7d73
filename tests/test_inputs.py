"""The decks of inputs/: each runs as it stands, on as many ranks as it names, on another token file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.read import read_deck
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import run_deck
from tests.data.preparing import prepare

INPUTS = Path(__file__).resolve().parents[1] / "inputs"
DECKS = sorted(path.name for path in INPUTS.glob("*.toml"))
STEPS = 2


def ranks_of(name: str) -> int:
    """How many ranks a deck's own command starts."""
    found = re.search(rf"^#   mpirun -n (\d+) hpctrain run inputs/{name}$", (INPUTS / name).read_text(), re.M)
    assert found is not None, name
    return int(found[1])


@pytest.mark.parametrize("name", [name for name in DECKS if name != "quickstart.toml"])
def test_it_begins_with_three_lines_about_it(name: str) -> None:
    lines = (INPUTS / name).read_text().splitlines()
    assert [line.startswith("# ") for line in lines[:4]] == [True, True, True, False]
    assert f"| [{name}]({name}) | {ranks_of(name)} | {lines[0][2:]} |" in (INPUTS / "README.md").read_text()


def check_decks(world: World, folder: Path) -> None:
    """Train those for as many ranks as there are for two steps."""
    if world.rank == 0:
        (folder / "text.txt").write_text("".join(f"{n * n % 997} lines of text\n" for n in range(8000)))
    world.everyone.barrier()
    prepare(world, folder / "tokens.h5", [str(folder / "text.txt")])
    names = [name for name in DECKS if ranks_of(name) == world.size]
    assert names
    for name in names:
        deck = read_deck(INPUTS / name, ranks=world.size)
        title = deck.run.title
        assert title == name.removesuffix(".toml")
        run = folder / title
        shorter = ["learning_rate.warmup=1", f"run.steps={STEPS}", "run.evaluate_sequences=4"]
        changes = [f"run.dir={run}", "machine.peak_flops=1e10", *shorter]
        changes += [f"data.tokens={folder}/tokens.h5"] if deck.data.dataset is None else []
        assert run_deck(world, INPUTS / name, changes) == 0
        if world.rank == 0:
            assert len(read_metrics(run / "metrics.jsonl")) == STEPS
            assert (run / f"checkpoints/step-{STEPS:08}.h5").exists()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_decks_for_two_ranks_run(world: World, mpi_tmp_path: Path) -> None:
    check_decks(world, mpi_tmp_path)


@pytest.mark.mpi(min_size=4, max_size=4)
def test_decks_for_four_ranks_run(world: World, mpi_tmp_path: Path) -> None:
    check_decks(world, mpi_tmp_path)
