"""The benchmark of collectives: what it measures, not how fast that is.

Tests of bench/collectives.py and bench/peers.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.bench.collectives import CollectiveRow, bench, print_rows, write_rows
from hpctrain.bench.peers import OPERATIONS
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError


@pytest.mark.mpi(min_size=2, max_size=2)
def test_every_primitive_is_timed(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpctrain.bench.collectives.SECONDS_PER_CASE", 0.001)
    rows = bench(world, "all", "1 KiB", "4 KiB", gloo=False)
    assert [(row.operation, row.bytes) for row in rows] == [
        (name, size) for name in OPERATIONS for size in (1024, 4096)
    ]
    assert all(row.hpctrain > 0 and row.mpi4py > 0 and row.gloo is None for row in rows)
    print_rows(rows, world.size)
    assert capsys.readouterr().out.count(" 4 KiB") == len(OPERATIONS)
    path = mpi_tmp_path / f"rows.{world.rank}.json"
    write_rows(rows, world.size, path)
    assert len(json.loads(path.read_text())["rows"]) == len(rows)


def test_limits() -> None:
    assert CollectiveRow("x", 1024, 20e-6, 6e-6, None).good
    assert not CollectiveRow("x", 1024, 22e-6, 6e-6, None).good
    assert CollectiveRow("x", 65536, 108e-6, 100e-6, None).good
    assert not CollectiveRow("x", 65536, 112e-6, 100e-6, None).good


@pytest.mark.mpi(min_size=1, max_size=2)
def test_mistakes(world: World) -> None:
    with pytest.raises(HpctrainError, match="must be of"):
        bench(world, "all_redvce", "1 KiB", "4 KiB", gloo=False)
    with pytest.raises(HpctrainError, match="must be 4 bytes or more"):
        bench(world, "reduce", "1 MiB", "4 KiB", gloo=False)
