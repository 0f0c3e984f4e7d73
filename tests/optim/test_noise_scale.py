"""Noise scale of gradients with known noise, and of runs that are resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.optim.noise_scale import NoiseScale
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.run import resume, run_deck
from hpctrain.watch.status import stored_status
from tests.data.preparing import prepare
from tests.train.test_run import DECK


def test_estimates_are_unbiased() -> None:
    """The true gradient has the square norm 13 and its noise the trace 400.

    16 samples are in parts of 1, 3, 5 and 7. Each part's mean is weighted by its number of samples, which is
    equivalent to batches of 4 samples.
    """
    generator = np.random.default_rng(0)
    true, spread = np.array([2.0, 0.0, -3.0, 0.0]), np.sqrt([100.0, 200.0, 50.0, 50.0])
    samples = np.array([1, 3, 5, 7])
    draws = 20_000
    noise = generator.standard_normal((draws, 4, 4)) / np.sqrt(samples)[None, :, None]
    means = true + spread * noise
    shares = samples / samples.sum()
    small = (means**2).sum(2) @ shares
    big = (np.einsum("dpe,p->de", means, shares) ** 2).sum(1)
    found = np.array([estimates(*pair) for pair in zip(small, big, strict=True)])
    errors = found.std(0) / np.sqrt(draws)
    assert errors[0] < 0.3 and errors[1] < 5
    assert (np.abs(found.mean(0) - (13, 400)) < 4 * errors).all()
    average = NoiseScale(draws)
    for pair in zip(small, big, strict=True):
        average.update(*pair, batch=16, ratio=4)
    assert average.metrics(tokens=10)["noise_scale"] == pytest.approx(400 / 13, rel=0.05)


def estimates(small: float, big: float) -> tuple[float, float]:
    """Return the estimates of one update, which are the averages over a single one."""
    single = NoiseScale(1)
    single.update(small, big, batch=16, ratio=4)
    return single.signal, single.noise


def test_averages_are_of_the_newest_steps_with_weights_that_add_up_to_one() -> None:
    average, every = NoiseScale(3), [(5.0, 2.0), (4.0, 2.5), (9.0, 3.0), (1.0, 2.0)]
    assert average.metrics(1) == {}
    for count in range(1, 5):
        average.update(*every[count - 1], batch=8, ratio=2)
        weights = np.array([(2 / 3) ** (count - 1 - n) for n in range(count)])
        signals, noises = np.array([(2 * big - small, 8 * (small - big)) for small, big in every[:count]]).T
        figures, total = average.metrics(7), weights.sum()
        assert figures["gradient_signal"] == pytest.approx(weights @ signals / total)
        assert figures["gradient_noise"] == pytest.approx(weights @ noises / total)
        scale = weights @ noises / (weights @ signals)
        assert scale < 0 or figures["noise_scale"] == pytest.approx(scale)
        assert scale < 0 or figures["noise_scale_tokens"] == pytest.approx(7 * scale)
        assert ("noise_scale" in figures) == (scale > 0)
    assert not all((2 * big - small) * (small - big) > 0 for small, big in every)


@pytest.mark.parametrize(("small", "there"), [(1.0, False), (3.0, True), (5.0, False)])
def test_the_scale_exists_if_signal_and_noise_are_positive(small: float, there: bool) -> None:
    average = NoiseScale(3)
    average.update(small, 2.0, batch=8, ratio=2)
    figures = average.metrics(1)
    assert (figures["gradient_signal"] > 0, figures["gradient_noise"] > 0) == (small < 4, small > 2)
    assert ("noise_scale" in figures) == there


def test_without_steps_nothing_is_stored_or_restored() -> None:
    off, on = NoiseScale(0), NoiseScale(5)
    on.update(3.0, 2.0, 8, 2)
    off.resume(on.state())
    assert (off.state(), off.metrics(1)) == ({}, {})
    other = NoiseScale(9)
    other.resume({"step": 3})
    assert other.state() == NoiseScale(9).state()
    other.resume(on.state())
    assert other.metrics(4) == on.metrics(4) != {}


NOT_OF_TRAINING = ("seconds", "tokens_per_s", "mfu", "peak_rss_bytes", "payload_bytes")
FIGURES = {"gradient_signal", "gradient_noise"}


def rows_of(world: World, folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without times and bytes, on all ranks."""
    rows = read_metrics(folder / "metrics.jsonl") if world.rank == 0 else []
    kept = [{key: row[key] for key in row if key not in NOT_OF_TRAINING} for row in rows]
    shared: list[dict[str, Any]] = world.everyone.broadcast_object(kept)
    return shared


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_resumed_run_has_the_metrics_of_an_uninterrupted_one(world: World, mpi_tmp_path: Path) -> None:
    """All other metrics are those of a run that does not measure it."""
    path = mpi_tmp_path / "small.toml"
    if world.rank == 0:
        (mpi_tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
        path.write_text(DECK.format(tokens=mpi_tmp_path / "tokens.h5"))
    world.everyone.barrier()
    prepare(world, mpi_tmp_path / "tokens.h5", [str(mpi_tmp_path / "text.txt")])
    on, keys = "run.noise_scale_steps=3", ["run.steps=6", "checkpoint.every=4"]
    whole, without = mpi_tmp_path / "whole", mpi_tmp_path / "without"
    assert run_deck(world, path, [*keys, on, f"run.dir={whole}"]) == 0
    assert run_deck(world, path, [*keys, f"run.dir={without}"]) == 0
    measured, plain, last = rows_of(world, whole), rows_of(world, without), "checkpoints/step-00000006.h5"
    assert len(measured) == 6 and all(row.keys() >= FIGURES for row in measured)
    for row, other in zip(measured, plain, strict=True):
        assert not other.keys() & FIGURES
        assert {key: row[key] for key in other} == other
    told = [stored_status(folder) for folder in (whole, without)]
    assert told[0]["noise_scale"] == measured[-1].get("noise_scale")
    assert "noise_scale" not in told[1]
    stored = read_state(whole / last, world.everyone)["noise_scale"]
    assert stored["weight"] == pytest.approx(1 - (2 / 3) ** 6)
    world.everyone.barrier()
    if world.rank == 0:
        (whole / last).unlink()
    world.everyone.barrier()
    assert resume(world, whole, []) == 0
    assert rows_of(world, whole) == measured
    assert read_state(whole / last, world.everyone)["noise_scale"] == stored
    # From a checkpoint without them, averages begin.
    assert "noise_scale" not in read_state(without / last, world.everyone)
    assert resume(world, without, ["run.steps=7", on]) == 0
    assert rows_of(world, without)[6].keys() >= FIGURES
    begun = read_state(without / "checkpoints/step-00000007.h5", world.everyone)["noise_scale"]
    assert begun["weight"] == pytest.approx(1 / 3)
