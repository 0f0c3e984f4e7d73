"""The benchmark of checkpoints: its figures are of what the deck's engine holds, and nothing stays behind."""

from __future__ import annotations

import json
import sys
from math import isfinite
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from hpctrain.bench.checkpoint_speed import CheckpointBenchOptions, bench_checkpoint
from hpctrain.bench.peers.collective_calls import start_gloo, stop_gloo
from hpctrain.bench.peers.torch_checkpoint import TorchCheckpoint
from hpctrain.bench.plain_files import PeakMemory, read_plain, write_plain
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.parallel.shards import Shard
from tests.engines import DECK

PARAMETERS = 2 * (12 * 32 * 32 + 13 * 32) + (61 + 32 + 2) * 32


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_figures_of_a_small_deck(world: World, mpi_tmp_path: Path, compute: str) -> None:
    """Whole on every rank in single precision, cut over the ranks in half."""
    deck, output = mpi_tmp_path / "deck.toml", mpi_tmp_path / "figures.json"
    if world.rank == 0:
        deck.write_text(DECK)
    world.everyone.barrier()
    half = compute == "bf16"
    overrides = [f"precision.compute={compute}", f"layout.zero={int(half)}", "checkpoint.buffer=1 MiB"]
    bench_checkpoint(world, deck, overrides, CheckpointBenchOptions(1, dcp=True, folder=mpi_tmp_path), output)
    world.everyone.barrier()
    assert sorted(path.name for path in mpi_tmp_path.iterdir()) == ["deck.toml", "figures.json"]
    figures = json.loads(output.read_text())
    rows = {row["name"]: row for row in figures["rows"]}
    assert rows.keys() == {
        *("plain write", "collective", "in training", "background", "dcp save"),
        *("plain read", "load", "dcp load"),
    }
    read = 12 * PARAMETERS * (1 if half else world.size)
    for name, row in rows.items():
        reading = name in ("plain read", "load", "dcp load")
        assert row["bytes"] == (read if reading else (14 if half else 12) * PARAMETERS), name
        numbers = [*row["seconds"], *row["of_plain"], *row["of_dcp"]]
        assert len(numbers) == 3, name
        assert all(isfinite(number) and number > 0 for number in numbers), name
        assert row["extra_bytes"] is None or row["extra_bytes"] >= 0, name
        other = rows["plain read" if reading else "plain write"]
        assert row["of_plain"][0] == pytest.approx(
            row["bytes"] / other["bytes"] * other["seconds"][0] / row["seconds"][0]
        )
    training = figures["training"]
    assert 0 < training["held_up"][0] < rows["in training"]["seconds"][0]
    assert training["of_collective"][0] == training["held_up"][0] / rows["collective"]["seconds"][0]
    assert training["steps"][0] >= 1
    assert training["slower"][0] > 0


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("whole", [True, False])
def test_torch_gets_back_what_it_saved(world: World, mpi_tmp_path: Path, whole: bool) -> None:
    rank, size, rows = world.rank, world.size, 3
    shape = (rows, 5)
    values = torch.arange(15.0)
    shard = Shard.replicated("a", shape)
    half = TensorRange(
        "/model/a", shard, values[15 * rank // size : 15 * (rank + 1) // size], 15 * rank // size
    )
    entry = TensorRange("/model/a", shard, values, copy=rank, copies=size) if whole or size == 1 else half
    start_gloo(world)
    torch_way = TorchCheckpoint(world, [entry], ["/model/a"])
    # Rows as DTensor deals them out: as many for each rank as there are at the most, until none are left.
    most = rows if whole else -(-rows // size)
    left = [rows if whole else min(most, max(0, rows - most * each)) for each in range(size)]
    assert world.everyone.all_gather_object(torch_way.read_bytes) == [20 * each for each in left]
    (tensor,) = torch_way.state.values()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.copy_(torch.arange(local.numel()).view(local.shape) + rank * (not whole))
    saved = local.clone()
    torch_way.save(mpi_tmp_path / "dcp")
    local.zero_()
    torch_way.load(mpi_tmp_path / "dcp")
    stop_gloo()
    assert torch.equal(local, saved)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_folder_that_is_not_there(world: World, mpi_tmp_path: Path) -> None:
    deck = mpi_tmp_path / "deck.toml"
    if world.rank == 0:
        deck.write_text(DECK)
    world.everyone.barrier()
    with pytest.raises(HpctrainError, match=r"--dir .*missing: must be an existing folder"):
        bench_checkpoint(world, deck, [], CheckpointBenchOptions(1, folder=mpi_tmp_path / "missing"), None)


def test_plain_files_take_turns(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        write_plain(path, (16 << 20) + 5)
        assert path.stat().st_size == (16 << 20) + 5
    read_plain(paths, (32 << 20) + 10)
    with pytest.raises(InputOutputError, match="ends 1 bytes before the expected end"):
        read_plain(paths, (32 << 20) + 11)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_peak_of_memory() -> None:
    extra = PeakMemory()
    np.ones(64 << 20, np.uint8).sum()
    found = extra.stop()
    assert found is None or 60 << 20 < found < 80 << 20
    extra = PeakMemory()
    found = extra.stop()
    assert found is None or found < 4 << 20
