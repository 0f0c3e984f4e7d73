"""Checkpoints of servers: for other workers and servers, for runs without any, and from those."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.load import read_state
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.server.server_checkpoints import ServedCheckpoints
from hpctrain.train.server.server_trainer import ServedTrainer
from hpctrain.train.step import StepResult
from tests.engines import trainer
from tests.train.server.served import part_of, plain, served, served_deck, values

KEYS = ("model.tied=false", "optimizer.clip=0.1")


def checkpoints(training: ServedTrainer, world: World) -> ServedCheckpoints:
    return ServedCheckpoints(training.deck, training.engine, {}, world, training.roles)


def saved(world: World, deck: Deck, steps: int) -> Path:
    """The checkpoint of so many steps of a deck with servers."""
    training = served(world, deck)
    for _ in range(steps):
        training.train_step()
    keeping = checkpoints(training, world)
    keeping.save(training.state)
    assert keeping.has_newest(steps)
    assert (keeping.expected_bytes() > 0) == (training.server is not None)
    return Path(deck.run.dir) / "checkpoints" / f"step-{steps:08}.h5"


def gone_on(
    world: World, deck: Deck, path: Path, steps: int
) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    """Results and parameters of a run with servers that goes on."""
    training = served(world, deck)
    training.set_state(checkpoints(training, world).restore(path))
    return [training.train_step() for _ in range(steps)], values(training)


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_goes_on_with_others_or_none(world: World, mpi_tmp_path: Path, mode: str) -> None:
    """Two workers and two servers write; three and one go on, and so do three plain ranks."""
    deck = served_deck(mode, 2, *KEYS, f"run.dir={mpi_tmp_path}/run")
    path = saved(world, deck, 2)
    state = read_state(path, world.everyone)
    assert (state["step"], state["samples"], state["ranks"]) == (2, 24, 4)
    assert state["updates"] == (4 if mode == "async" else 2)
    fewer = served_deck(mode, 1, *KEYS, f"run.dir={mpi_tmp_path}/fewer")
    results, after = gone_on(world, fewer, path, 2)
    if mode != "sync":
        assert results[-1].tokens > 0
        return
    three = part_of(world, 3)
    if three is None:
        return
    without = plain(fewer)
    training = trainer(three, without)
    training.state = Checkpoints(without, training.engine, {}).restore(path)
    expected = training.train(2)
    assert [step.metrics for step in results] == [step.metrics for step in expected]
    assert all(torch.equal(after[name], each) for name, each in training.parameters().items())


@pytest.mark.mpi(min_size=2, max_size=2)
def test_servers_go_on_from_a_run_without_any(world: World, mpi_tmp_path: Path) -> None:
    """And on the same layout bit for bit as if nothing had been written."""
    deck = served_deck("sync", 1, *KEYS, f"run.dir={mpi_tmp_path}/run")
    without = plain(deck)
    training = trainer(world, without)
    training.train(2)
    keeping = Checkpoints(without, training.engine, {})
    keeping.save(training.state)
    assert keeping.newest is not None
    expected = training.train(2)
    results, after = gone_on(world, deck, keeping.newest, 2)
    # One worker adds up what two ranks have added.
    for one, other in zip(results, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
    again, same = gone_on(world, deck, keeping.newest, 2)
    assert [step.metrics for step in again] == [step.metrics for step in results]
    assert all(torch.equal(after[name], same[name]) for name in after)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_the_history_tells_of_all_ranks(world: World, mpi_tmp_path: Path) -> None:
    path = saved(world, served_deck("async", 1, f"run.dir={mpi_tmp_path}/run"), 1)
    (segment,) = read_state(path, world.everyone)["history"]
    assert segment["ranks"] == 2 and segment["layout"]["servers"] == 1 and segment["layout"]["data"] == 1
