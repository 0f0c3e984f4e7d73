"""The benchmark of collectives: what it measures, not how fast that is.

Tests of bench/collective_speed.py and bench/peers/collective_calls.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.bench.collective_speed import CollectiveRow, bench_collectives
from hpctrain.bench.peers.collective_calls import OPERATIONS
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError


@pytest.mark.mpi(min_size=2, max_size=2)
def test_every_primitive_is_timed(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpctrain.bench.collective_speed.SECONDS_PER_CASE", 0.001)
    path = mpi_tmp_path / "rows.json"
    bench_collectives(world, "all", "1 KiB", "4 KiB", gloo=False, output=path)
    text = capsys.readouterr().out
    assert text.count(" 4 KiB") == (len(OPERATIONS) if world.rank == 0 else 0)
    assert ("reduce_scatter from 64 MiB, 0.17 times the time of mpi4py" in text) == (world.rank == 0)
    rows = [CollectiveRow(**row) for row in json.loads(path.read_text())["rows"]]
    assert [(row.operation, row.bytes) for row in rows] == [
        (name, size) for name in OPERATIONS for size in (1024, 4096)
    ]
    assert all(row.hpctrain > 0 and row.mpi4py > 0 and row.gloo is None and row.shared for row in rows)


def test_limits() -> None:
    assert CollectiveRow("x", 1024, 20e-6, 6e-6, None).within_limits
    assert not CollectiveRow("x", 1024, 22e-6, 6e-6, None).within_limits
    assert CollectiveRow("x", 65536, 108e-6, 100e-6, None).within_limits
    assert not CollectiveRow("x", 65536, 112e-6, 100e-6, None).within_limits


def test_limits_of_what_goes_through_memory() -> None:
    def good(operation: str, size: int, ours: float, plain: float, gloo: float | None = None) -> bool:
        return CollectiveRow(operation, size, ours, plain, gloo, shared=True).within_limits

    huge = 64 * 2**20
    assert good("all_reduce", huge, 4.0, 10.0) and not good("all_reduce", huge, 4.1, 10.0)
    assert good("all_reduce", huge, 4.0, 10.0, 16.0) and not good("all_reduce", huge, 4.0, 10.0, 15.0)
    assert good("reduce_scatter", huge, 1.0, 6.0, 1.0) and not good("reduce_scatter", huge, 1.0, 5.9, 9.0)
    assert good("all_gather", huge, 1.1, 1.0) and good("all_reduce", huge // 4, 1.1, 1.0)
    assert good("all_gather", 65536, 1e-6, 1e-6) and not good("all_gather", 1024, 2e-6, 1e-6)
    assert good("broadcast", 1024, 2e-6, 1e-6)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_mistakes(world: World) -> None:
    with pytest.raises(HpctrainError, match="--operations "):
        bench_collectives(world, "all_redvce", "1 KiB", "4 KiB", gloo=False, output=None)
    with pytest.raises(HpctrainError, match="must be at least 4 bytes"):
        bench_collectives(world, "reduce", "1 MiB", "4 KiB", gloo=False, output=None)
