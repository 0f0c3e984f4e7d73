"""Hooks of a step: when they are called, in which order, and what they are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.train.hook import Hook, StepDone
from tests.engines import small_deck, trainer


class Note(Hook):
    """Writes down its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls
        self.done: list[StepDone] = []

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        self.calls.append(f"{self.name} before {step}")
        yield
        self.calls.append(f"{self.name} behind {step}")

    def before_update(self) -> None:
        self.calls.append(f"{self.name} update")

    def after_step(self, done: StepDone) -> None:
        self.calls.append(f"{self.name} after {done.state.step}")
        self.done.append(done)


def test_hooks_are_called_in_their_order(world: World) -> None:
    training, calls = trainer(world.single_rank_world(), small_deck()), list[str]()
    first, second = Note("a", calls), Note("b", calls)
    training.hooks += [first, second]
    result = training.train_step()
    around = ["a before 1", "b before 1", "a update", "b update", "b behind 1", "a behind 1"]
    assert calls == [*around, "a after 1", "b after 1"]
    assert first.done[0].result is result
    assert 0 <= first.done[0].compute_seconds <= first.done[0].seconds


@pytest.mark.mpi(min_size=2, max_size=2)
def test_they_are_told_what_the_ledger_counts_of_the_step(world: World) -> None:
    own = World(world.communicator.Dup())
    watched, calls = trainer(own, small_deck()), list[str]()
    plain = trainer(World(world.communicator.Dup()), small_deck())
    own.ledger.enter("data", "all_reduce", 1000, 0.0)
    watched.hooks.append(note := Note("a", calls))
    for _ in range(2):
        before = own.ledger.bytes
        assert watched.train_step().metrics == plain.train_step().metrics
        assert (
            note.done[-1].payload
            == own.ledger.bytes - before
            > 8 * sum(bucket.layout.used_length for bucket in watched.engine.stage.buckets)
        )


def test_a_skipped_update_is_no_update(world: World) -> None:
    training, calls = trainer(world.single_rank_world(), small_deck()), list[str]()
    training.hooks.append(Note("a", calls))
    values = training.engine.stage.buckets[0].values
    assert values is not None
    values.fill_(torch.nan)
    assert training.train_step().skipped
    assert calls == ["a before 1", "a behind 1", "a after 1"]
