"""What counts as 100% MFU: measured once, kept, and never exceeded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import resume, run_deck
from hpctrain.watch import peak_flops as machine
from hpctrain.watch.peak_flops import PeakFlops, measure_gemm_flops
from tests.train.test_run import DECK, deck_file

__all__ = ["deck_file"]


class Gauge:
    """Stands in for the measurement: one rate after the other, a rank's number added."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: World, *rates: float) -> None:
        self.rates, self.rank = list(rates), world.rank
        monkeypatch.setattr(machine, "measure_gemm_flops", self)

    def __call__(self, dtype: torch.dtype, device: torch.device) -> float:
        return self.rates.pop(0) + self.rank


def peak_of(world: World, folder: Path, *overrides: str) -> PeakFlops:
    peak = PeakFlops(world, parse_deck(DECK.format(tokens="x"), ["machine.peak_flops=", *overrides]), folder)
    peak.find()
    return peak


@pytest.mark.mpi(min_size=1, max_size=2)
def test_it_is_kept_by_kind_of_machine_and_precision(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean = (world.size - 1) / 2
    gauge = Gauge(monkeypatch, world, 1e9, 3e9, 5e9, 7e9)
    assert peak_of(world, mpi_tmp_path).flops == 1e9 + mean
    assert peak_of(world, mpi_tmp_path).flops == 1e9 + mean
    assert peak_of(world, mpi_tmp_path, "precision.compute=bf16").flops == 3e9 + mean
    assert peak_of(world, mpi_tmp_path, "run.threads=2").flops == 5e9 + mean
    assert peak_of(world, mpi_tmp_path, "precision.compute=bf16").flops == 3e9 + mean
    assert peak_of(world, mpi_tmp_path, "machine.peak_flops=2.0").flops == 2.0
    assert len(gauge.rates) == 1
    world.everyone.barrier()
    if world.rank == 0:
        (mpi_tmp_path / "peak.json").write_text('{"x": 1.0')
    world.everyone.barrier()
    assert peak_of(world, mpi_tmp_path).flops == 7e9 + mean


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_is_beyond_it_is_the_new_one_and_measured_anew_once(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gauge(monkeypatch, world, 1e9, 2e9)
    peak = peak_of(world, mpi_tmp_path)
    assert peak.share(5e8) == pytest.approx(0.5)
    assert not peak.exceeded
    if world.rank == 0:
        assert peak.share(4e9) == 1.0
        assert peak.exceeded
    peak.measure_again()
    assert (peak.flops, peak.exceeded) == (4e9, False)
    assert (peak.share(5e9), peak.exceeded) == (1.0, False)
    assert peak_of(world, mpi_tmp_path).flops == 4e9
    given = peak_of(world, mpi_tmp_path, "machine.peak_flops=2e9")
    assert (given.share(5e9), given.exceeded) == (2.5, False)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_no_step_of_a_run_has_more_than_all_of_it(
    world: World, deck_file: Path, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge = Gauge(monkeypatch, world, 1e3, 1e13)
    folder = mpi_tmp_path / "run"
    run_deck(world, deck_file, [f"run.dir={folder}", "machine.peak_flops=", "run.steps=4"])
    resume(world, folder, ["run.steps=6"])
    world.everyone.barrier()
    shares = [row["mfu"] for row in read_metrics(folder / "metrics.jsonl")]
    assert shares[0] == 1.0
    assert all(share < 0.1 for share in shares[1:])
    assert gauge.rates == []
    assert (folder / "log.txt").read_text().count("which was measured again: 10000.0 GFLOP/s") == 1


def test_it_is_at_least_what_a_product_reaches_and_soon_there() -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    rate = measure_gemm_flops(torch.float32, torch.device("cpu"))
    passed = time.perf_counter() - began
    assert 1e8 < rate < 1e13
    assert passed >= 0.3
