"""Training with servers: against plain training, one mode against another, and the bytes of the ledger."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.step import StepResult
from tests.train.server.served import by_itself, part_of, served, served_deck, values

STEPS = 4
RAMP = ("model.tied=false", "model.dropout=0.1", "batch.ramp_from=6", "batch.ramp_steps=3")
HALF = ("precision.compute=bf16", "optimizer.clip=0.1", 'model.frozen=["blocks.0.*"]')


class Seen(Hook):
    """All steps that the hooks of a rank are told of."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def after_step(self, done: StepDone) -> None:
        """See Hook."""
        self.results.append(done.result)

    after_step_alone = after_step


def check_as_plain(world: World, mode: str, servers: int, workers: int, *overrides: str) -> None:
    """Steps and parameters are, bit for bit, those of plain data parallel training on as many ranks."""
    deck = served_deck(mode, servers, *overrides)
    whole, few = part_of(world, servers + workers), part_of(world, workers)
    reference = None if few is None else by_itself(few, deck, STEPS)
    if whole is None:
        return
    training = served(whole, deck)
    seen = Seen()
    training.hooks.append(seen)
    training.advance(lambda step: step == STEPS, lambda: False)
    if training.update_log is not None:
        assert reference is not None
        for result, expected in zip(seen.results, reference[0], strict=True):
            assert (result.metrics, result.grad_norm) == (expected.metrics, expected.grad_norm)
            assert (result.learning_rate, result.tokens) == (expected.learning_rate, expected.tokens)
    after = values(training)
    for name, each in reference[1].items() if reference is not None else ():
        assert torch.equal(after[name], each), name


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(
    ("servers", "workers", "keys"),
    [(1, 2, ()), (2, 2, HALF), (1, 3, RAMP)],
)
def test_in_step_servers_train_as_plain_data_parallel_ranks(
    world: World, servers: int, workers: int, keys: tuple[str, ...]
) -> None:
    check_as_plain(world, "sync", servers, workers, *keys)


@pytest.mark.mpi(min_size=4, max_size=4)
def test_a_distance_of_no_step_is_in_step(world: World) -> None:
    check_as_plain(world, "stale", 2, 2, "communication.server.staleness=0")


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_one_worker_trains_as_one_rank_does(world: World, mode: str) -> None:
    check_as_plain(world, mode, 1, 1, "optimizer.clip=0.1", "model.tied=false")
