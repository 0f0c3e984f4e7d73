"""Ranks that compute for longer than others are named."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.train.run import run_deck
from hpctrain.train.step import Step
from hpctrain.watch import stragglers as module
from hpctrain.watch.stragglers import WINDOW, find_stragglers
from tests.engines import small_deck, trainer
from tests.train.test_run import deck_file

__all__ = ["deck_file"]


def named(seconds: list[float], work: list[int], factor: float = 1.5) -> list[tuple[int, str, float]]:
    nodes = [f"n{rank // 2}" for rank in range(len(seconds))]
    found = find_stragglers(seconds, work, nodes, factor)
    return [(straggler.rank, straggler.node, straggler.times) for straggler in found]


def test_ranks_far_above_the_median() -> None:
    assert named([1.0, 1.1, 0.9, 1.0], [0] * 4) == []
    assert named([1.0, 1.0, 4.0, 2.0], [0] * 4) == [(2, "n1", 4.0), (3, "n1", 2.0)]
    assert named([1.0, 1.0, 4.0, 2.0], [0] * 4, factor=3.0) == [(2, "n1", 4.0)]
    assert named([0.1, 1.0, 1.0, 1.0], [0] * 4) == []
    assert named([2.0, 1.0], [0] * 2) == [(0, "n0", 2.0)]
    assert named([0.0, 0.0, 1.0], [0] * 3) == []


def test_ranks_are_compared_with_those_of_the_same_work() -> None:
    assert named([1.0, 1.0, 3.0, 3.0], [0, 0, 1, 1]) == []
    assert named([1.0, 1.0, 3.0, 6.0], [0, 0, 1, 1]) == [(3, "n1", 2.0)]
    assert named([1.0, 1.0, 3.0], [0, 1, 2]) == []
    assert named([1.0, 1.0, 2.0, 9.0], [0, 1, 1, 2]) == [(2, "n1", 2.0)]


@pytest.mark.mpi(min_size=2)
def test_a_slowed_rank_is_named_once(
    world: World, deck_file: Path, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, prepare = world.size - 1, Step.prepare

    def slowed(self: Step, *arguments):
        if world.rank == last:
            time.sleep(0.1 * world.size / 8)  # of a step's 8 sequences each rank has as many
        return prepare(self, *arguments)

    monkeypatch.setattr(Step, "prepare", slowed)
    monkeypatch.setattr(module, "WINDOW", 5)  # two windows after the first step
    folder = mpi_tmp_path / "run"
    keys = [f"run.dir={folder}", "checkpoint.every=0", "run.evaluate_every=0", "batch.ramp_from=0"]
    keys += ["batch.ramp_steps=0", "batch.micro_size=1", "run.steps=11"]
    assert run_deck(world, deck_file, keys) == 0
    if world.rank == 0:
        first = json.loads((folder / "status.json").read_text())["stragglers"][0]
        assert (first["rank"], first["node"]) == (last, world.hostname)
        assert first["times"] > 1.5
        log = (folder / "log.txt").read_text()
        assert log.count(f"WARNING rank {last} on {world.hostname} computes for ") == 1


def windows(world: World, deck: Deck, factor: float, seconds: float) -> list[list[int] | None]:
    """What a rank's steps of so many seconds come to."""
    stragglers = trainer(world, deck).stragglers(factor)
    found = [stragglers.step(seconds) for _ in range(2 * WINDOW + 1)]
    return [None if slow is None else [straggler.rank for straggler in slow] for slow in found]


@pytest.mark.mpi(min_size=2)
def test_ranks_compare_once_in_a_window(world: World) -> None:
    world.ledger.reset()
    slow = 2.0 if world.rank == 1 else 1.0
    found = windows(world, small_deck(), 1.5, slow)
    gathers = [row for row in world.ledger.rows() if row.operation == "gather"]
    assert [(row.calls, row.bytes) for row in gathers] == [(2, 2 * 8 * world.size)]
    at = [index for index, slow in enumerate(found) if slow is not None]
    if world.rank == 0:
        assert at == [WINDOW, 2 * WINDOW]  # the first step warms up
        assert found[WINDOW] == found[2 * WINDOW] == [1]
    else:
        assert at == []
    assert windows(world, small_deck(), 0.0, slow) == [None] * (2 * WINDOW + 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("frozen", [(), ("blocks.1.*",)])
def test_stages_are_compared_where_their_layers_are_alike(world: World, frozen: tuple[str, ...]) -> None:
    """A stage for each rank: of the middle ones, with a block each, that of the third rank is slow."""
    size = world.size
    keys = [f"layout.pipeline={size}", f"model.layers={size}", f"layout.split={[1] * size}"]
    keys.append(f"model.frozen={json.dumps(frozen)}")
    found = windows(world, small_deck(*keys), 1.5, 2.0 if world.rank in (2, size - 1) else 1.0)
    if world.rank == 0:
        others = set(range(1, size - 1)) - ({1} if frozen else set())
        assert found[WINDOW] == ([2] if len(others) > 1 and 2 in others else [])


@pytest.mark.mpi(min_size=2)
def test_a_single_slow_step_is_no_straggler(world: World) -> None:
    stragglers = trainer(world, small_deck()).stragglers(1.5)
    found = [stragglers.step(100.0 if step == 5 and world.rank else 1.0) for step in range(WINDOW + 1)]
    assert found[-1] == ([] if world.rank == 0 else None)
