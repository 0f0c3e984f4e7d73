"""Whole runs with servers: figures, evaluation, checkpoints, stops, errors.

Tests of train/run.py where a deck has servers.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.bench.communication_forms import bench_communication
from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches, MicroBatch
from hpctrain.errors import HpctrainError
from hpctrain.report.contents import layout_text
from hpctrain.report.metric_rows import read_metrics
from hpctrain.train.replay import replay
from hpctrain.train.run import resume, run_deck
from tests.data.preparing import prepare

DECK = """
[run]
title = "served"
steps = 6
evaluate_every = 3
evaluate_sequences = 8
[model]
family = "llama"
layers = 2
hidden = 32
heads = 4
tied = false
[data]
tokens = "{tokens}"
validation = 0.1
[batch]
global_size = 12
micro_size = 2
sequence = 32
[learning_rate]
peak = 1e-2
warmup = 2
decay_steps = 20
[checkpoint]
every = 4
[machine]
peak_flops = 1e10
[communication]
server = "{mode}"
"""


def deck_file(world: World, folder: Path, mode: str) -> Path:
    """A deck on a small corpus, in a folder that all ranks share."""
    if world.rank == 0:
        (folder / "text.txt").write_text("".join(f"{n * n % 997} lines of text\n" for n in range(800)))
        (folder / "deck.toml").write_text(DECK.format(tokens=folder / "tokens.h5", mode=mode))
    world.everyone.barrier()
    prepare(world, folder / "tokens.h5", [str(folder / "text.txt")])
    return folder / "deck.toml"


def rows(folder: Path) -> list[dict[str, Any]]:
    """Its metrics, without what takes time or is sent."""
    timed = {"seconds", "tokens_per_s", "mfu", "peak_rss_bytes", "staleness", "payload_bytes"}
    found = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in timed} for row in found]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_one_worker_and_a_server_are_a_run_of_one_rank(world: World, mpi_tmp_path: Path) -> None:
    """All figures have the same bits, and so have those of runs that go on from each other's checkpoints."""
    path = deck_file(world, mpi_tmp_path, "sync")
    served, alone, back = (mpi_tmp_path / name for name in ("served", "alone", "back"))
    assert run_deck(world, path, [f"run.dir={served}"]) == 0
    without = ["communication.server=none", "batch.micro_size=2"]
    if world.rank == 0:
        assert run_deck(world.single_rank_world(), path, [f"run.dir={alone}", *without]) == 0
        assert rows(served) == rows(alone)
        assert [row["step"] for row in rows(served) if "validation_loss" in row] == [3, 6]
        names = sorted(each.name for each in (served / "checkpoints").glob("step-*"))
        assert names == ["step-00000004.h5", "step-00000006.h5"]
        log = (served / "log.txt").read_text()
        assert "2 ranks (1 server, 1 worker; sync)" in log
        assert "staleness   pushes by staleness: 0: 6" in log
        plan = json.loads((served / "plan.json").read_text())
        assert plan["predicted"]["roles"] == {"servers": 1, "workers": 1} and len(plan["measured"]) == 2
        layout = read_state(served / "checkpoints" / "step-00000006.h5")["history"][0]["layout"]
        assert layout_text(layout) == "one rank, servers 1"
        assert {row["axis"] for row in json.loads((served / "ledger.json").read_text())} >= {"server"}
        # Each goes on from the other's.
        assert resume(world.single_rank_world(), served, [*without, "run.steps=8"]) == 0
    world.everyone.barrier()
    more = ["communication.server.mode=async", "run.steps=8", f"run.dir={back}"]
    assert resume(world, alone / "checkpoints" / "step-00000006.h5", more) == 0
    if world.rank == 0:
        assert rows(served)[6:] == rows(back)


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("mode", ["async", "stale"])
def test_a_run_stops_in_good_order_and_goes_on(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A signal that comes to the last worker alone, amid a long stretch of steps."""
    path, run = deck_file(world, mpi_tmp_path, mode), mpi_tmp_path / "run"
    keys = [f"run.dir={run}", "run.steps=40", "run.evaluate_every=0", "checkpoint.every=0"]
    keys += ["communication.server.ranks=2" if mode == "stale" else "communication.server.ranks=1"]
    reading = Batches.step

    def warned(batches: Batches, first: int, *others: int) -> Iterator[MicroBatch]:
        if world.rank == 3 and first >= 3 * 12:
            os.kill(os.getpid(), signal.SIGUSR2)
            monkeypatch.setattr(Batches, "step", reading)
        return reading(batches, first, *others)

    monkeypatch.setattr(Batches, "step", warned)
    assert run_deck(world, path, keys) == 75
    monkeypatch.setattr(Batches, "step", reading)
    assert resume(world, run, ["run.steps=12"]) == 0
    if world.rank == 0:
        found = read_metrics(run / "metrics.jsonl")
        assert [row["step"] for row in found] == list(range(1, 13))
        assert [row["tokens"] for row in found] == [12 * 32 * step for step in range(1, 13)]
        workers = 2 if mode == "stale" else 3
        assert all(sum(row["staleness"]) == workers for row in found)
        assert all(len(row["staleness"]) <= 2 for row in found) or mode == "async"
        text = (run / "log.txt").read_text()
        assert "SIGUSR2 was received by rank 3" in text
        assert "resumes from" in text


@pytest.mark.mpi(min_size=4, max_size=4)
def test_what_one_worker_cannot_read_is_an_error_on_all_ranks(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reading = deck_file(world, mpi_tmp_path, "stale"), Batches.step

    def broken(batches: Batches, first: int, *others: int) -> Iterator[MicroBatch]:
        if world.rank == 2 and first >= 2 * 12:
            raise OSError(5, "broken", "tokens.h5")
        return reading(batches, first, *others)

    monkeypatch.setattr(Batches, "step", broken)
    with pytest.raises(HpctrainError, match=r"tokens\.h5") as caught:
        run_deck(world, path, [f"run.dir={mpi_tmp_path}/run"])
    assert caught.value.exit_code == 3 and world.is_agreed(caught.value)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_the_head_cannot_write_is_an_error_on_all_ranks(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = deck_file(world, mpi_tmp_path, "async")

    def full(*_: object) -> None:
        raise HpctrainError("the disk is full")

    monkeypatch.setattr("hpctrain.watch.reporter.Reporter.step", full)
    with pytest.raises(HpctrainError, match="the disk is full") as caught:
        run_deck(world, path, [f"run.dir={mpi_tmp_path}/run"])
    assert world.is_agreed(caught.value)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_what_goes_in_step_can_be_replayed(world: World, mpi_tmp_path: Path) -> None:
    """Other updates come in another order each time."""
    path, run = deck_file(world, mpi_tmp_path, "sync"), mpi_tmp_path / "run"
    assert run_deck(world, path, [f"run.dir={run}"]) == 0
    four = run / "checkpoints" / "step-00000004.h5"
    said: list[str] = []
    assert replay(world, four, None, [], None, said.append) == 0
    assert world.rank or "are equal to the recorded, bit for bit" in said[-1]
    with pytest.raises(HpctrainError, match="has an order of updates that cannot be reproduced"):
        replay(world, four, None, ["communication.server.mode=async"], None, said.append)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_servers_are_among_the_forms_of_a_benchmark(world: World, mpi_tmp_path: Path) -> None:
    """All steps in one stretch, as a run makes them: payload is what the server sends and receives."""
    path, figures = deck_file(world, mpi_tmp_path, "sync"), mpi_tmp_path / "figures.json"
    bench_communication(world, path, ["run.steps=3"], ["exact", "server async"], [], figures)
    if world.rank == 0:
        exact, served = json.loads(figures.read_text())
        assert served["name"] == "server async" and served["validation"] == pytest.approx(
            exact["validation"], rel=1e-4
        )
        # Push and pull of all but the rows of the table that were not touched.
        assert 0.5 * exact["payload"] < served["payload"] < 1.1 * exact["payload"]
