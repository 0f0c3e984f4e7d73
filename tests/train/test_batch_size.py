"""The ramp of the batch: its closed form, and that it never depends on a layout."""

from __future__ import annotations

from hpctrain.train.batch_size import batch_at, samples_of
from tests.engines import small_deck


def test_the_batch_grows_by_what_it_began_with() -> None:
    deck = small_deck("batch.global_size=32", "batch.ramp_from=8", "batch.ramp_steps=12")
    sizes = [batch_at(deck.batch, step) for step in range(14)]
    assert sizes == [8] * 4 + [16] * 4 + [24] * 4 + [32] * 2


def test_a_ramp_need_not_divide_the_batch() -> None:
    deck = small_deck("batch.global_size=20", "batch.ramp_from=8", "batch.ramp_steps=3")
    assert [batch_at(deck.batch, step) for step in range(5)] == [8, 8, 16, 20, 20]


def test_without_a_ramp_it_is_always_the_same() -> None:
    assert {batch_at(small_deck().batch, step) for step in range(5)} == {8}


def test_samples_are_those_of_all_steps() -> None:
    for keys in ([], ["batch.global_size=20", "batch.ramp_from=8", "batch.ramp_steps=3"]):
        batch = small_deck(*keys).batch
        for steps in range(6):
            assert samples_of(batch, steps) == sum(batch_at(batch, step) for step in range(steps))
