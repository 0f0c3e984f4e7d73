from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.bench.offload_speed import bench_offload
from hpctrain.comm.world import World
from tests.engines import DECK


@pytest.mark.mpi(min_size=1, max_size=2)
def test_figures_of_a_small_deck(world: World, mpi_tmp_path: Path) -> None:
    """Every byte of two moments is read and written once; the share is that of the three times."""
    deck, output = mpi_tmp_path / "deck.toml", mpi_tmp_path / "figures.json"
    if world.rank == 0:
        deck.write_text(DECK)
    world.everyone.barrier()
    offload_dir = mpi_tmp_path / "offload"
    bench_offload(world, deck, [f"memory.offload_dir={offload_dir}", "layout.zero=1"], 1, output)
    world.everyone.barrier()
    figures = json.loads(output.read_text())
    parameters = 2 * 12 * 32 * 32 + (61 + 32) * 32
    assert 16 * parameters < figures["bytes_moved"] * world.size < 17.5 * parameters
    bound = figures["disk_seconds"] + figures["compute_seconds"]
    assert figures["share"] == pytest.approx(bound / figures["update_seconds"])
    assert not offload_dir.exists()


@pytest.mark.mpi(min_size=1, max_size=2)
def test_nothing_is_left_where_a_run_would_write(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mpi_tmp_path)
    if world.rank == 0:
        Path("deck.toml").write_text(DECK)
    world.everyone.barrier()
    bench_offload(world, Path("deck.toml"), ["layout.zero=1"], 1, None)
    world.everyone.barrier()
    assert [path.name for path in mpi_tmp_path.iterdir()] == ["deck.toml"]
